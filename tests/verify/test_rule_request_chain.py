"""Rule request-id: the id that is sent is the one that is recorded, through resumes too."""

from __future__ import annotations

import pytest
from made_up import RESUMES, RESUMES_STREAM, SENDS, STREAMS, source

from patchctl.verify import request_chain
from patchctl.verify.findings import Finding


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
        RESUMES.replace(
            "            chosen = ", "            final.extra_fields.update(output.extra_fields)\n            chosen = "
        ),
        RESUMES.replace("            while True:\n", "            while not final.done:\n"),
        SENDS.replace("LLMServerClient", "OtherServer"),
        "class LLMServerClient:\n    async def generate(self):\n        return await super().generate()\n",
        STREAMS,
        RESUMES_STREAM,
    ],
)
def test_accepts(text: str) -> None:
    assert check(text) == []


LAST = "if piece.stop_reason is not None or piece.extra_fields:"
OPENED = 'server.generate_stream.options(num_returns="streaming").remote(**request)'
KEPT = 'chain.append({"request_id": last.extra_fields.get("request_id"), "num_tokens": 1})'


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (STREAMS, {LAST: "if piece.stop_reason is not None:"}),
        (STREAMS, {LAST: "if piece.extra_fields or piece.stop_reason is not None:"}),
        (STREAMS, {f"                    {LAST}\n    ": ""}),
        (STREAMS, {"request = {": "request = dict(request_id=sent)\n                other = {"}),
        (
            STREAMS,
            {'                    "request_id": sent,\n': "", "pieces =": 'request["request_id"] = sent; pieces ='},
        ),
        (STREAMS, {"**request)": "request_id=sent, prompt_ids=prompt_ids)"}),
        (STREAMS, {"generate_stream.options": "sample.options"}),
        (STREAMS, {f"                pieces = {OPENED}\n": "", "in pieces": f"in {OPENED}"}),
        (SENDS, {"output: TokenOutput = await": "later =", "output.extra_": "output = await later; output.extra_"}),
        (RESUMES_STREAM, {"stop_reason is None and not piece.extra_fields": "stop_reason is None"}),
        (
            RESUMES_STREAM,
            {f"                {KEPT}\n": "", "last = piece": f"last = piece; {KEPT.replace('last', 'piece')}"},
        ),
        (
            RESUMES_STREAM,
            {
                "                async with aclosing(\n    ": "                pieces = (\n",
                ") as pieces:": ")",
                "    async for": "async for",
                "    if piece.": "if piece.",
                "    yield piece": "yield piece",
                "    else": "else",
                "    last = piece": "last = piece",
            },
        ),
    ],
)
def test_accepts_other_ways(text: str, changes: dict[str, str]) -> None:
    for old, new in changes.items():
        text = replaced(text, old, new)
    found = check(text)
    assert [str(one) for one in found] == []


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
         '                output.extra_fields["request_id"] = sent', 11, "this path ends before the id is recorded"),
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
        ('= chosen["request_id"]', '= output.extra_fields["request_id"]', 18, "does not come from `chain`"),
        ('= chosen["request_id"]', "= request_id", 18, "does not come from `chain`"),
        ("chosen = next((part for part in chain if part[\"num_tokens\"] > 0), chain[-1])", "chosen = chain[-1]", 18,
         "is the last of `chain`"),
        ('            final.extra_fields["request_chain"] = json.dumps(chain)\n', "", 6, "is not put into"),
        ("json.dumps(chain)", "json.dumps(chosen)", 6, "is not put into"),
        ("            return final\n", "            final.extra_fields.update(output.extra_fields)\n"
         "            return final\n", 20, "overwrites the chosen id"),
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


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('                    "request_id": sent,\n', "", 11, "without a request_id"),
        ('"request_id": sent,', '"request_id": uuid4().hex,', 8, "is kept nowhere"),
        ('"request_id": sent,', '"request_id": request_id,', 8, "not made for this request"),
        ("sent = uuid4().hex", "sent = request_id", 6, "not a fresh id"),
        ("sent = uuid4().hex", "sent = None", 6, "not a fresh id"),
        ('                        piece.extra_fields["request_id"] = sent\n', "                        pass\n", 12,
         "is not set to the id that is sent"),
        ('"request_id"] = sent', '"request_id"] = request_id', 16, "the one sent is `sent`"),
        ('"request_id"] = sent', '"id"] = sent', 12, "is not set to the id that is sent"),
        (LAST, "if piece.extra_fields:", 16, "not recorded on every path"),
        (LAST, "if piece.token_ids:", 16, "not recorded on every path"),
        (LAST, 'if piece.stop_reason == "completed":', 16, "not recorded on every path"),
        (LAST, LAST.replace(" or ", " and "), 16, "not recorded on every path"),
        (LAST, LAST.replace("is not None", "is None"), 16, "not recorded on every path"),
        (LAST, LAST.replace("piece.stop_reason is", "reference.stop_reason is"), 16, "not recorded on every path"),
        (f"                    {LAST}", f"                    if not piece.token_ids:\n"
         f"                        continue\n                    {LAST}", 16, "this path ends before the id is"),
        (f"                    {LAST}", f"                    yield piece\n                    {LAST}", 15,
         "`piece` is yielded before"),
        (f"                    {LAST}", f"                    piece = copy(piece)\n                    {LAST}", 15,
         "`piece` is replaced before"),
        ("piece: TokenOutput = await reference", "pass", 12, "is given no name"),
        ("async for reference in pieces:", "for other in ():", 12, "is given no name"),
        ("                pieces =", "                sent = uuid4().hex\n                pieces =", 12,
         "`sent` is changed after it was sent"),
    ],
)  # fmt: skip
def test_refuses_to_lose_the_id_of_a_stream(old: str, new: str, line: int, message: str) -> None:
    found = check(replaced(STREAMS, old, new))
    assert any(finding.line == line and message in finding.message for finding in found), [str(one) for one in found]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (f"                {KEPT}\n", "", 7, "is not kept"),
        ('last.extra_fields.get("request_id")', "request_id", 7, "is not kept"),
        (f"                {KEPT}", f"                if last.token_ids:\n                    {KEPT}", 16,
         "not kept on every path"),
        (f"                {KEPT}", f"                last = TokenOutput([])\n                {KEPT}", 16,
         "not kept on every path"),
        (f"                {KEPT}", f"                if not last.token_ids:\n                    break\n"
         f"                {KEPT}", 17, "not kept on every path"),
        ("last = piece", "last = pieces", 7, "is not kept"),
        ("piece.stop_reason is None and not", "piece.stop_reason is None or not", 7, "is not kept"),
        ("if piece.stop_reason is None and not piece.extra_fields", "if piece.token_ids", 7, "is not kept"),
        ("            chain = []\n            steps = []\n            while True:\n",
         "            steps = []\n            while True:\n                chain = []\n", 6, "made anew in the loop"),
        ("                request_id=chosen[\"request_id\"],\n", "", 6, "is not set after the loop"),
        ('request_id=chosen["request_id"]', 'request_id=last.extra_fields["request_id"]', 21,
         "does not come from `chain`"),
        ("chosen = next((part for part in chain if part[\"num_tokens\"] > 0), chain[-1])", "chosen = chain[-1]", 21,
         "is the last of `chain`"),
        (', "num_tokens": 1}', "}", 21, "is chosen from by 'num_tokens'"),
        ("                request_chain=json.dumps(chain),\n", "", 6, "is not put into"),
        ("                min_global_steps=steps[0],\n", "", 6, '["min_global_steps"]` is not set'),
        ("                max_global_steps=steps[-1],\n", "", 6, '["max_global_steps"]` is not set'),
        ("                global_steps=steps[-1],\n", "", 6, '["global_steps"]` is not set'),
        ("min_global_steps=steps[0]", "min_global_steps=steps[-1]", 21, "is not that of the first request"),
        ("max_global_steps=steps[-1]", "max_global_steps=steps[0]", 21, "is not that of the last request"),
        ("max_global_steps=steps[-1]", "max_global_steps=self.steps", 21, "does not come from what the requests"),
        ("            steps = []\n", "", 15, "`steps` is not made before it grows"),
        ("                steps.append(last.extra_fields.get(\"global_steps\"))\n", "", 20, "does not come from what"),
        ('steps.append(last.extra_fields.get("global_steps"))', "steps.append(chain)", 21, "does not come from what"),
        ("            yield last\n", "            yield wrap(last)\n", 6, "no output is yielded by name"),
    ],
)  # fmt: skip
def test_refuses_to_lose_the_ids_of_a_resumed_stream(old: str, new: str, line: int, message: str) -> None:
    text = new.join(RESUMES_STREAM.rsplit(old, 1))
    assert text != RESUMES_STREAM
    found = check(text)
    assert any(message in finding.message for finding in found), [str(one) for one in found]
    assert any(finding.line == line and message in finding.message for finding in found), [str(one) for one in found]


def test_what_is_sent_is_resumed() -> None:
    known = ("verl/one.py", "verl/two.py")
    sends, streams = source(SENDS, known[0]), source(STREAMS, known[0])
    resumes, both = source(RESUMES, known[1]), source(RESUMES + RESUMES_STREAM, known[1])
    assert request_chain.check_presence([sends, streams, both], known) == []
    assert request_chain.check_presence([sends, both], known) == []
    [finding] = request_chain.check_presence([sends, streams, resumes], known)
    assert (finding.path, finding.line) == (known[1], 2)
    assert "`generate_stream` of the client that sends is not resumed here" in finding.message
