"""Rule request-id: the id that is sent is the one that is recorded, through resumes too."""

from __future__ import annotations

import pytest
from made_up import source

from patchctl.verify import request_chain
from patchctl.verify.findings import Finding

SENDS = """
    class LLMServerClient:
        async def generate(self, request_id, *, prompt_ids, **kwargs):
            server_id, server = await self._acquire_server(request_id)
            try:
                sent = uuid4().hex
                output: TokenOutput = await server.generate.remote(
                    request_id=sent, prompt_ids=prompt_ids, **kwargs
                )
                output.extra_fields["request_id"] = sent
                return output
            finally:
                self._release_server(server_id)
"""
RESUMES = """
    class ResumingLLMServerClient(LLMServerClient):
        async def generate(self, request_id, *, prompt_ids, **kwargs):
            final = TokenOutput([])
            chain = []
            while True:
                output = await super().generate(request_id, prompt_ids=prompt_ids + final.token_ids, **kwargs)
                chain.append({"request_id": output.extra_fields.get("request_id"), "num_tokens": len(output.token_ids)})
                final.token_ids.extend(output.token_ids)
                if output.stop_reason != "aborted":
                    break
            final.extra_fields["steps"] = 1
            chosen = next((part for part in chain if part["num_tokens"] > 0), chain[-1])
            final.extra_fields["request_id"] = chosen["request_id"]
            final.extra_fields["request_chain"] = json.dumps(chain)
            return final
"""


def check(text: str) -> list[Finding]:
    return request_chain.check(source(text, "verl/workers/rollout/llm_server.py"))


def replaced(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


@pytest.mark.parametrize(
    "text",
    [
        SENDS,
        SENDS.replace('output.extra_fields["request_id"] = sent', "output.extra_fields.update(request_id=sent)"),
        SENDS.replace('output.extra_fields["request_id"] = sent', 'output.extra_fields.update({"request_id": sent})'),
        RESUMES,
        RESUMES.replace('output.extra_fields.get("request_id")', 'output.extra_fields["request_id"]'),
        RESUMES.replace('final.extra_fields["steps"] = 1', "final.extra_fields.update(output.extra_fields)"),
        RESUMES.replace("            while True:\n", "            while not final.done:\n"),
        SENDS.replace("LLMServerClient", "OtherServer"),
        "class LLMServerClient:\n    async def generate(self):\n        return await super().generate()\n",
    ],
)
def test_accepts(text: str) -> None:
    assert check(text) == []


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("request_id=sent,", "request_id=uuid4().hex,", 8, "is kept nowhere"),
        ("request_id=sent, ", "", 7, "without a request_id"),
        ("request_id=sent,", "request_id=request_id,", 8, "not made for this request"),
        ("sent = uuid4().hex", "sent = request_id", 6, "not a fresh id"),
        ('                output.extra_fields["request_id"] = sent\n', "", 7, "is not set to the id that is sent"),
        ('"request_id"] = sent', '"request_id"] = request_id', 10, "recorded is `request_id`, the one sent is `sent`"),
        ('"request_id"] = sent', '"request_id"] = uuid4().hex', 10, "recorded is `uuid4().hex`"),
        ('"request_id"] = sent', '"id"] = sent', 7, "is not set to the id that is sent"),
        ('output.extra_fields["request_id"] = sent', "if output:\n                    "
         'output.extra_fields["request_id"] = sent', 11, "not recorded on every path"),
        ('output.extra_fields["request_id"] = sent', "if not output:\n                    return output\n"
         '                output.extra_fields["request_id"] = sent', 11, "returns before the id is recorded"),
        ('output.extra_fields["request_id"] = sent', "output = wrap(output)\n"
         '                output.extra_fields["request_id"] = sent', 10, "`output` is replaced before"),
        ('output.extra_fields["request_id"] = sent', "sent = uuid4().hex\n"
         '                output.extra_fields["request_id"] = sent', 10, "`sent` is changed after it was sent"),
        ("output: TokenOutput = await", "return await", 7, "is given no name"),
    ],
)  # fmt: skip
def test_refuses_to_lose_the_id_that_is_sent(old: str, new: str, line: int, message: str) -> None:
    found = check(replaced(SENDS, old, new))
    assert any(finding.line == line and message in finding.message for finding in found), [str(one) for one in found]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("                chain.append({\"request_id\": output.extra_fields.get(\"request_id\"), "
         "\"num_tokens\": len(output.token_ids)})\n", "", 7, "is not kept"),
        ('{"request_id": output.extra_fields.get("request_id"), ', "{", 7, "is not kept"),
        ('output.extra_fields.get("request_id")', "request_id", 7, "is not kept"),
        ('output.extra_fields.get("request_id")', 'output.extra_fields.get("id")', 7, "is not kept"),
        ("                chain.append", "                if output.token_ids:\n                    chain.append", 9,
         "not kept on every path"),
        ("                chain.append", "                if not output.token_ids:\n                    continue\n"
         "                chain.append", 10, "not kept on every path"),
        ("            chain = []\n            while True:\n", "            while True:\n                chain = []\n",
         6, "made anew in the loop"),
        ("            chain = []\n", "", 7, "not made before the loop"),
        ('            final.extra_fields["request_id"] = chosen["request_id"]\n', "", 6, "is not set after the loop"),
        ('= chosen["request_id"]', '= output.extra_fields["request_id"]', 14, "does not come from `chain`"),
        ('= chosen["request_id"]', "= request_id", 14, "does not come from `chain`"),
        ("chosen = next((part for part in chain if part[\"num_tokens\"] > 0), chain[-1])", "chosen = chain[-1]", 14,
         "is the last of `chain`"),
        ('            final.extra_fields["request_chain"] = json.dumps(chain)\n', "", 6, "is not put into"),
        ("json.dumps(chain)", "json.dumps(chosen)", 6, "is not put into"),
        ("            return final\n", "            final.extra_fields.update(output.extra_fields)\n"
         "            return final\n", 16, "overwrites the chosen id"),
        ("return final", "return output", 6, "is the last request's output"),
        ("return final", "return wrap(final)", 6, "no output is returned by name"),
    ],
)  # fmt: skip
def test_refuses_to_lose_the_ids_of_resumes(old: str, new: str, line: int, message: str) -> None:
    found = check(replaced(RESUMES, old, new))
    assert any(finding.line == line and message in finding.message for finding in found), [str(one) for one in found]


def test_the_clients_are_somewhere() -> None:
    known = ("verl/one.py", "verl/two.py")
    sends, resumes = source(SENDS, known[0]), source(RESUMES, known[1])
    assert request_chain.check_presence([sends, resumes], known) == []
    assert request_chain.check_presence([source(SENDS + RESUMES, known[0])], known) == []
    [finding] = request_chain.check_presence([sends], known)
    assert (finding.path, "no client resumes a request" in finding.message) == (known[1], True)
    [finding] = request_chain.check_presence([resumes], known)
    assert finding.path == known[0]
