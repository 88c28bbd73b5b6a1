# ruff: noqa
# fmt: off
"""Two-sided msprobe dump tree with every awkward case a real run makes.
usage: make_dump_tree.py OUT [--style real|doc]   real: step0/rank0 (what msprobe writes)   doc: step_0/rank_0 (what the dump document shows)
Writes OUT/generate_sequence, OUT/update_actor, OUT/expected.json. No third-party packages, deterministic."""
import sys, os, json, random, hashlib, argparse
ap = argparse.ArgumentParser(); ap.add_argument('out'); ap.add_argument('--style', default='real', choices=['real', 'doc']); A = ap.parse_args()
SEP = '_' if A.style == 'doc' else ''
G, U = os.path.join(A.out, 'generate_sequence'), os.path.join(A.out, 'update_actor')
H, L = 64, 3
rng = random.Random(20260513)
def rid(tag): return hashlib.md5(('req' + tag).encode()).hexdigest()
def sfx(tag): return hashlib.sha1(('sfx' + tag).encode()).hexdigest()[:8]
def T(shape, seed, scale=1.0, dt='torch.bfloat16'):
    r = random.Random(hashlib.md5(repr(seed).encode()).hexdigest())
    return {"type": "torch.Tensor", "dtype": dt, "shape": shape, "Max": r.uniform(1, 4) * scale, "Min": -r.uniform(1, 4) * scale,
            "Mean": r.uniform(-.1, .1) * scale, "Norm": r.uniform(5, 20) * scale, "requires_grad": False}
def TI(shape): return {"type": "torch.Tensor", "dtype": "torch.int64", "shape": shape, "Max": 151643, "Min": 0, "Mean": None, "Norm": None, "requires_grad": False}
def infer_dump(n, seed, diverge=None):
    d = {"Module.model.embed_tokens.VocabParallelEmbedding.forward.0": {"input_args": [TI([n])], "input_kwargs": {}, "output": [T([n, H], (seed, 'emb'))]}}
    for i in range(L):
        s = 1.3 if diverge is not None and i >= diverge else 1.0
        p = f"Module.model.layers.{i}."
        for m, c, o in (("input_layernorm", "AscendRMSNorm", H), ("self_attn.qkv_proj", "AscendQKVParallelLinear", 2 * H), ("self_attn.o_proj", "AscendRowParallelLinear", H),
                        ("post_attention_layernorm", "AscendRMSNorm", H), ("mlp.gate_up_proj", "AscendMergedColumnParallelLinear", 4 * H), ("mlp.down_proj", "AscendRowParallelLinear", H)):
            d[f"{p}{m}.{c}.forward.0"] = {"input_args": [T([n, H], (seed, i, m, 'i'))], "input_kwargs": {}, "output": [T([n, o], (seed, i, m, 'o'), s)]}
    d["Module.model.norm.AscendRMSNorm.forward.0"] = {"input_args": [T([n, H], (seed, 'n'))], "input_kwargs": {}, "output": [T([n, H], (seed, 'no'))]}
    return {"task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None, "data": d}
def train_dump(n, seed):
    d = {"Module._fsdp_wrapped_module.model.embed_tokens.Embedding.forward.0": {"input_args": [TI([1, n])], "input_kwargs": {}, "output": [T([1, n, H], (seed, 'emb'))]}}
    for i in range(L):
        p = f"Module._fsdp_wrapped_module.model.layers.{i}._fsdp_wrapped_module."
        for m, c, o, k in (("input_layernorm", "Qwen2RMSNorm", H, "input_layernorm"), ("self_attn.q_proj", "Linear", H, "self_attn.qkv_proj"), ("self_attn.k_proj", "Linear", H // 2, "self_attn.qkv_proj"),
                           ("self_attn.v_proj", "Linear", H // 2, "self_attn.qkv_proj"), ("self_attn.o_proj", "Linear", H, "self_attn.o_proj"), ("post_attention_layernorm", "Qwen2RMSNorm", H, "post_attention_layernorm"),
                           ("mlp.gate_proj", "Linear", 2 * H, "mlp.gate_up_proj"), ("mlp.up_proj", "Linear", 2 * H, "mlp.gate_up_proj"), ("mlp.down_proj", "Linear", H, "mlp.down_proj")):
            d[f"{p}{m}.{c}.forward.0"] = {"input_args": [T([1, n, H], (seed, i, k, 'i'))], "input_kwargs": {}, "output": [T([1, n, o], (seed, i, k, 'o'))]}
    d["Module._fsdp_wrapped_module.model.norm.Qwen2RMSNorm.forward.0"] = {"input_args": [T([1, n, H], (seed, 'n'))], "input_kwargs": {}, "output": [T([1, n, H], (seed, 'no'))]}
    return {"task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None, "data": d}
def wr(path, obj):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w') as f: json.dump(obj, f, indent=1)
logs = {}
def emit(path, rec): logs.setdefault(path, []).append(json.dumps(rec, ensure_ascii=False))
ts = lambda s: f"2026-05-13T10:{s // 60 % 60:02d}:{s % 60:02d}"
class Infer:
    """one vLLM worker process"""
    def __init__(s, pid, rank=0): s.pid, s.rank, s.step, s.skew = pid, rank, 0, 0
    def run(s, reqs, phase, dump=True, log=True, total=None, diverge=None, empty_dir=False):
        n = total if total is not None else sum(t for _, _, t in reqs)
        if log:
            emit(f"{G}/{s.pid}/dispatch_log.jsonl", {"source": "dispatch_logger", "timestamp": ts(s.step), "pid": s.pid, "rank": s.rank, "step": s.step, "phase": phase,
                 "total_num_scheduled_tokens": n, "requests": [{"request_id": r, "type": ty, "tokens": t} for r, ty, t in reqs]})
        d = f"{G}/{s.pid}/step{SEP}{s.step + s.skew}/rank{SEP}{s.rank}"
        if empty_dir: os.makedirs(d, exist_ok=True)
        elif dump: wr(d + "/dump.json", infer_dump(n, ','.join(r.rsplit('-', 1)[0] for r, _, _ in reqs), diverge))
        s.step += 1; return s.step - 1
def train(pid, rank, step, ids, n, dump=True, t0=100, phase=None):
    rec = {"source": "update_actor", "timestamp": ts(t0 + step), "pid": pid, "rank": rank, "step": step, "request_ids": ids, "num_requests": len(ids)}
    emit(f"{U}/{pid}/update_actor_log.jsonl", rec)
    if dump: wr(f"{U}/step{SEP}{step}/rank{SEP}{rank}/dump.json", train_dump(n, ','.join(ids)))
    else: os.makedirs(f"{U}/step{SEP}{step}/rank{SEP}{rank}", exist_ok=True)
E = {}
def exp(case, r, status, infer=None, tr=None, why='', alt=None):
    E[r] = {"case": case, "status": status, "infer": infer, "train": tr, "why": why, **({"infer_other": alt} if alt else {})}
R = {k: rid(k) for k in ['clean', 'l1', 'chunk', 'mixA', 'mixB', 'late', 'preempt', 'preempt2', 'prefix', 'prefix1', 'inferonly', 'trainonly', 'trunc', 'noinf', 'notrain',
                         'dup', 'tp', 'dpA', 'dpB', 'multiA', 'multiB', 'rk0', 'rk1', 'turn1', 'turn2', 'drift', 'phantom', 'retry', 'nosfx', 'epoch']}
R['dash'] = 'job7-0badcafe'          # an outer id that itself ends like a suffix
S = lambda k: f"{R[k]}-{sfx(k)}"      # what vllm >= 0.14 logs
a, b, c0, c1, old = Infer(4001), Infer(4002), Infer(4010, 0), Infer(4011, 1), Infer(3900)
TA, TB = 5001, 5002
# --- server A (pid 4001, rank 0)
s = a.run([], 'decode', total=0, dump=False)                                    # a step with nothing scheduled, logged, no dump
s = a.run([(S('clean'), 'new', 95)], 'prefill'); train(TA, 0, 0, [R['clean']], 95)
exp('single request, one step, suffix', R['clean'], 'PAIR', {"pid": 4001, "step": s, "rank": 0}, {"step": 0, "rank": 0})
a.run([(S('clean'), 'cached', 1)], 'decode')
s = a.run([(S('l1'), 'new', 33)], 'prefill', diverge=1); train(TA, 0, 1, [R['l1']], 33)
exp('single request, real divergence from layer 1', R['l1'], 'PAIR', {"pid": 4001, "step": s, "rank": 0}, {"step": 1, "rank": 0}, 'compare must name layer 1 first')
for _ in range(3): a.run([(S('clean'), 'cached', 1), (S('l1'), 'cached', 1)], 'decode')
s1 = a.run([(S('chunk'), 'new', 64)], 'prefill'); s2 = a.run([(S('chunk'), 'cached', 31)], 'prefill'); train(TA, 0, 2, [R['chunk']], 95)
exp('prefill cut in two chunks', R['chunk'], 'CHUNKED', {"pid": 4001, "steps": [s1, s2], "rank": 0}, {"step": 2, "rank": 0}, '64+31=95: both steps alone, neither is the whole prompt; statistics cannot be joined')
s = a.run([(S('mixA'), 'new', 40), (S('mixB'), 'new', 50)], 'prefill'); train(TA, 0, 3, [R['mixA']], 40); train(TA, 0, 4, [R['mixB']], 50)
exp('two prompts in one step', R['mixA'], 'MIXED', {"pid": 4001, "step": s, "rank": 0, "slice": [0, 40]}, {"step": 3, "rank": 0}, 'slice only after checking the order of tokens')
exp('two prompts in one step', R['mixB'], 'MIXED', {"pid": 4001, "step": s, "rank": 0, "slice": [40, 90]}, {"step": 4, "rank": 0})
s = a.run([(S('late'), 'new', 30), (S('mixA'), 'cached', 1), (S('mixB'), 'cached', 1)], 'prefill'); train(TA, 0, 5, [R['late']], 30)
exp('prompt together with decodes', R['late'], 'MIXED', {"pid": 4001, "step": s, "rank": 0}, {"step": 5, "rank": 0}, 'phase says prefill, requests is 3; where the 30 tokens lie depends on the runner (decodes are often put first), so no slice can be promised')
s = a.run([(S('preempt'), 'new', 20)], 'prefill'); [a.run([(S('preempt'), 'cached', 1)], 'decode') for _ in range(4)]
s9 = a.run([(S('preempt'), 'cached', 24)], 'prefill'); train(TA, 0, 6, [R['preempt']], 20)
exp('preempted, prefilled again alone with 4 generated tokens', R['preempt'], 'PAIR', {"pid": 4001, "step": s, "rank": 0}, {"step": 6, "rank": 0}, f'step {s9} is also phase=prefill with one request: 24 tokens, wrong', alt=[s9])
s = a.run([(S('preempt2'), 'new', 20), (S('preempt'), 'cached', 1)], 'prefill'); s9 = a.run([(S('preempt2'), 'cached', 22)], 'prefill'); train(TA, 0, 7, [R['preempt2']], 20)
exp('first prefill mixed, resumed one alone but longer', R['preempt2'], 'MIXED', {"pid": 4001, "step": s, "rank": 0}, {"step": 7, "rank": 0}, f'the lone step {s9} must not be taken: 22 != 20', alt=[s9])
s = a.run([(S('prefix'), 'new', 15)], 'prefill'); train(TA, 0, 8, [R['prefix']], 95)
exp('prefix cache hit (n>1 of one prompt)', R['prefix'], 'PARTIAL', {"pid": 4001, "step": s, "rank": 0}, {"step": 8, "rank": 0}, '15 of 95 tokens were computed; turn enable_prefix_caching off')
s = a.run([(S('prefix1'), 'new', 1)], 'decode'); train(TA, 0, 9, [R['prefix1']], 95)
exp('prefix cache hit that leaves one token: phase says decode', R['prefix1'], 'PARTIAL', {"pid": 4001, "step": s, "rank": 0}, {"step": 9, "rank": 0}, 'type new, phase decode')
s = a.run([(S('inferonly'), 'new', 44)], 'prefill')
exp('never trained on (aborted / filtered)', R['inferonly'], 'NO_TRAIN', {"pid": 4001, "step": s, "rank": 0}, None)
s = a.run([(S('noinf'), 'new', 28)], 'prefill', empty_dir=True); train(TA, 0, 10, [R['noinf']], 28)
exp('inference dump.json missing', R['noinf'], 'NO_INFER_DUMP', {"pid": 4001, "step": s, "rank": 0}, {"step": 10, "rank": 0})
s = a.run([(S('notrain'), 'new', 29)], 'prefill'); train(TA, 0, 11, [R['notrain']], 29, dump=False)
exp('training dump.json missing', R['notrain'], 'NO_TRAIN_DUMP', {"pid": 4001, "step": s, "rank": 0}, {"step": 11, "rank": 0})
s = a.run([(S('dup'), 'new', 37)], 'prefill'); train(TA, 0, 12, [R['dup']], 37); train(TA, 0, 40, [R['dup']], 37)
exp('DUMP_PHASE=all: log_prob at step 12, update_actor at step 40', R['dup'], 'PAIR', {"pid": 4001, "step": s, "rank": 0}, {"step": 12, "rank": 0}, 'the first is before the weights change')
s = a.run([(S('epoch'), 'new', 38)], 'prefill'); [train(TA, 0, k, [R['epoch']], 38) for k in (13, 41, 42)]
exp('ppo_epochs=2 and both phases', R['epoch'], 'PAIR', {"pid": 4001, "step": s, "rank": 0}, {"step": 13, "rank": 0})
s = a.run([(S('dash'), 'new', 21)], 'prefill'); train(TA, 0, 14, [R['dash']], 21)
exp('outer id itself ends in -{8hex}', R['dash'], 'PAIR', {"pid": 4001, "step": s, "rank": 0}, {"step": 14, "rank": 0}, 'cut one suffix only, and only when the whole id is not known')
s = a.run([(R['nosfx'], 'new', 22)], 'prefill'); train(TA, 0, 15, [R['nosfx']], 22)
exp('vllm < 0.14: no suffix', R['nosfx'], 'PAIR', {"pid": 4001, "step": s, "rank": 0}, {"step": 15, "rank": 0})
s = a.run([(S('multiA'), 'new', 25)], 'prefill'); sb = a.run([(S('multiB'), 'new', 26)], 'prefill'); train(TA, 0, 16, [R['multiA'], R['multiB']], 51)
exp('micro batch of two', R['multiA'], 'TRAIN_MULTI', {"pid": 4001, "step": s, "rank": 0}, {"step": 16, "rank": 0}); exp('micro batch of two', R['multiB'], 'TRAIN_MULTI', {"pid": 4001, "step": sb, "rank": 0}, {"step": 16, "rank": 0})
train(TA, 0, 17, [], 60)                                                        # request_id lost on the way: an empty list
s = a.run([(S('turn1'), 'new', 31)], 'prefill'); s2 = a.run([(S('turn2'), 'new', 77)], 'prefill'); train(TA, 0, 18, [R['turn2']], 31)
exp('first turn of an agent loop: a request id of its own', R['turn1'], 'NO_TRAIN', {"pid": 4001, "step": s, "rank": 0}, None, 'training keeps only the last turn id')
exp('last turn of an agent loop', R['turn2'], 'LENGTH', {"pid": 4001, "step": s2, "rank": 0}, {"step": 18, "rank": 0}, '77 inference tokens against 31: the first-turn prompt')
s = a.run([(S('phantom'), 'new', 27)], 'prefill', dump=False); train(TA, 0, 19, [R['phantom']], 27)
exp('logged after the configured steps ended', R['phantom'], 'NO_INFER_DUMP', {"pid": 4001, "step": s, "rank": 0}, {"step": 19, "rank": 0})
a.run([(S('clean'), 'cached', 1)], 'decode', dump=False); a.skew = -1            # from here the log counter runs one ahead of msprobe's
s = a.run([(S('drift'), 'new', 45)], 'prefill'); a.run([(S('drift'), 'cached', 1)], 'decode'); train(TA, 0, 20, [R['drift']], 45)
exp('log counter one ahead of msprobe', R['drift'], 'DRIFT', {"pid": 4001, "step": s, "rank": 0, "dump_step": s - 1}, {"step": 20, "rank": 0}, 'the dump at the logged step holds 1 token, the log says 45')
train(TA, 0, 21, [R['trainonly']], 39); exp('trained on, no inference log', R['trainonly'], 'NO_INFER', None, {"step": 21, "rank": 0})
# --- server B (pid 4002, also rank 0: another replica), killed while writing
s = b.run([(S('dpB'), 'new', 52)], 'prefill'); train(TB, 1, 0, [R['dpB']], 52)
exp('second replica: same rank and step numbers, another pid', R['dpB'], 'PAIR', {"pid": 4002, "step": s, "rank": 0}, {"step": 0, "rank": 1})
s = b.run([(S('rk1'), 'new', 53)], 'prefill'); train(TB, 1, 1, [R['rk1']], 53)
exp('training rank 1, same step number as rank 0', R['rk1'], 'PAIR', {"pid": 4002, "step": s, "rank": 0}, {"step": 1, "rank": 1})
s = b.run([(f"{R['retry']}-00000001", 'new', 16), (S('dpB'), 'cached', 1)], 'prefill'); s2 = b.run([(f"{R['retry']}-00000002", 'new', 16)], 'prefill'); train(TB, 1, 2, [R['retry']], 16)
exp('one outer id sent twice, two suffixes', R['retry'], 'PAIR', {"pid": 4002, "step": s2, "rank": 0}, {"step": 2, "rank": 1}, 'the lone full-length one of the two')
st = b.run([(S('trunc'), 'new', 41)], 'prefill'); train(TB, 1, 3, [R['trunc']], 41)
exp('log line cut by the kill', R['trunc'], 'NO_INFER', None, {"step": 3, "rank": 1}, f'the dump at pid 4002 step {st} exists, its line is cut')
# --- one server with tensor parallel 2: two processes, two pids, ranks 0 and 1, the same requests
for w in (c0, c1): s = w.run([(S('tp'), 'new', 61)], 'prefill')
train(TB, 1, 4, [R['tp']], 61)
exp('tensor parallel 2', R['tp'], 'PAIR', {"pid": 4010, "step": s, "rank": 0}, {"step": 4, "rank": 1}, 'both ranks listed; only replicated modules (norms, o_proj/down_proj outputs, embedding output) may be compared with an unsharded trainer', alt=[{"pid": 4011, "step": s, "rank": 1}])
# --- an old run left in the same folder
old.run([(f"{rid('old')}-aaaaaaaa", 'new', 70)], 'prefill')
exp('left over from an earlier run', rid('old'), 'NO_TRAIN', {"pid": 3900, "step": 0, "rank": 0}, None)
for p, ls in logs.items():
    os.makedirs(os.path.dirname(p), exist_ok=True)
    with open(p, 'w') as f:
        txt = '\n'.join(ls) + '\n'
        if '/4002/' in p: txt = txt[:-70]
        f.write(txt)
for k in ('dpA', 'rk0'): R.pop(k)
wr(f"{A.out}/expected.json", {"style": A.style, "requests": E, "warnings": ["1 unreadable line (pid 4002, last line)", "1 training line with no request id (step 17)"]})
print(len(E), 'requests;', {x: sum(v['status'] == x for v in E.values()) for x in sorted({v['status'] for v in E.values()})})
