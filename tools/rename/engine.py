# ruff: noqa: B007, B023, E501, E741
"""Replayable rename: engine.py TREE.  Tables in tables/*.tsv next to this file."""

from __future__ import annotations

import ast
import io
import keyword
import os
import re
import subprocess
import sys
import time
import tokenize
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from lsp import Pyright, path_of

HERE = Path(__file__).parent
TREE = Path(sys.argv[1]).resolve()
PKG = "tensor_comprehensions"
report: dict[str, list[str]] = defaultdict(list)


def say(kind, text):
    report[kind].append(text)


# ---------------------------------------------------------------- tables
def rows(name):
    f = HERE / "tables" / name
    for n, l in enumerate(f.read_text().splitlines() if f.exists() else []):
        l = l.split("#")[0].strip() if not name.startswith("strings") else l.strip()
        if l and not l.startswith("#"):
            yield n + 1, (l.split() if not name.startswith("strings") else l.split("\t"))


def full(m):  # module key -> dotted
    return (
        m
        if m.split(".")[0] in ("tests", "benchmarks", "examples") or m == PKG or m.startswith(PKG + ".")
        else f"{PKG}.{m}"
    )


files = [
    TREE / p
    for p in subprocess.run(
        ["git", "-C", str(TREE), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    if p
]
files = [p for p in files if p.exists() and HERE not in p.parents and TREE / "tools/rename" not in p.parents]
PY = [p for p in files if p.suffix == ".py" and not p.name.endswith("_pb2.py")]
ALLPY = [p for p in files if p.suffix == ".py"]


def dotted(p):
    parts = list(p.relative_to(TREE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


MODULES = {dotted(p): p for p in ALLPY}
PACKAGES = {dotted(p) for p in ALLPY if p.name == "__init__.py"}
FOLDERS = {
    ".".join(p.relative_to(TREE).parent.parts[:i])
    for p in ALLPY
    for i in range(1, len(p.relative_to(TREE).parent.parts) + 1)
}

# module moves: exact module -> module ; folder -> folder (prefix)
moves, folder_moves = {}, {}
for n, r in rows("modules.tsv"):
    old, new = full(r[0]), full(r[1])
    if old.endswith(".*"):
        folder_moves[old[:-2]] = new[:-2]
    else:
        moves[old] = new
        if old not in MODULES:
            say("missing module", old)


def moved(m):
    if m in moves:
        return moves[m]
    for old in sorted(folder_moves, key=len, reverse=True):
        if m == old or m.startswith(old + "."):
            return folder_moves[old] + m[len(old) :]
    return m


NEWMOD = {m: moved(m) for m in MODULES}
clash = defaultdict(list)
for m, n in NEWMOD.items():
    clash[n].append(m)
for n, ms in clash.items():
    if len(ms) > 1:
        say("ERROR module clash", f"{n}: {ms}")

# ---------------------------------------------------------------- definitions
SRC = {p: p.read_text() for p in ALLPY}
LINES = {p: s.split("\n") for p, s in SRC.items()}
TREES = {p: ast.parse(s) for p, s in SRC.items()}


def col(p, line, byte):  # ast byte offset -> utf16 col (== char for BMP)
    l = LINES[p][line - 1]
    return len(l.encode()[:byte].decode(errors="ignore")) if not l.isascii() else byte


DEF = {}  # (path,line0,col) -> qualname
MEMBERS = defaultdict(dict)  # (module, Class) -> member names
BASES = {}  # (module, Class) -> [(module, Class)]
TOP = defaultdict(set)
IMPORTED = {}  # module -> {local: (module, name)}


def resolve_from(m, node):
    if not node.level:
        return node.module or ""
    parts = m.split(".")
    if m not in PACKAGES:
        parts = parts[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join(parts + ([node.module] if node.module else []))


def find_col(p, line, start, name):
    l = LINES[p][line - 1]
    m = re.compile(rf"\b{re.escape(name)}\b").search(l, start)
    return m.start() if m else start


def index(p):
    m = dotted(p)
    imp = IMPORTED[m] = {}

    def targets(t):
        if isinstance(t, ast.Name):
            yield t
        elif isinstance(t, (ast.Tuple, ast.List)):
            for e in t.elts:
                yield from targets(e)
        elif isinstance(t, ast.Starred):
            yield from targets(t.value)

    def func(f, qual, cls):
        line = f.lineno
        c = find_col(p, line, col(p, line, f.col_offset), f.name)
        DEF[p, line - 1, c] = qual
        a = f.args
        for x in a.posonlyargs + a.args + a.kwonlyargs + [y for y in (a.vararg, a.kwarg) if y]:
            DEF[p, x.lineno - 1, col(p, x.lineno, x.col_offset)] = f"{qual}({x.arg})"
        if cls and (a.posonlyargs + a.args):
            me = (a.posonlyargs + a.args)[0].arg
            for n in ast.walk(f):
                if (
                    isinstance(n, ast.Attribute)
                    and isinstance(n.ctx, ast.Store)
                    and isinstance(n.value, ast.Name)
                    and n.value.id == me
                ):
                    c = col(p, n.end_lineno, n.end_col_offset) - len(n.attr)
                    DEF[p, n.end_lineno - 1, c] = f"{cls}.{n.attr}"
                    MEMBERS[m, cls].setdefault(n.attr, "a")
        for n in f.body:
            nested(n, qual)

    def nested(n, qual):  # nested functions: their params only
        for x in ast.walk(n):
            if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef)):
                a = x.args
                for y in a.posonlyargs + a.args + a.kwonlyargs:
                    DEF.setdefault((p, y.lineno - 1, col(p, y.lineno, y.col_offset)), f"{qual}.<>{x.name}({y.arg})")

    def body(nodes, cls):
        for n in nodes:
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
                func(n, f"{cls}.{n.name}" if cls else n.name, cls)
                (MEMBERS[m, cls].__setitem__(n.name, "m") if cls else TOP[m].add(n.name))
            elif isinstance(n, ast.ClassDef):
                c = find_col(p, n.lineno, col(p, n.lineno, n.col_offset) + 5, n.name)
                if not cls:
                    DEF[p, n.lineno - 1, c] = n.name
                    TOP[m].add(n.name)
                    BASES[m, n.name] = list(n.bases)
                    MEMBERS[m, n.name]
                    body(n.body, n.name)
            elif isinstance(n, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.With)):
                ts = (
                    n.targets
                    if isinstance(n, ast.Assign)
                    else [n.target]
                    if isinstance(n, (ast.AnnAssign, ast.AugAssign))
                    else [n.target]
                    if isinstance(n, ast.For)
                    else [i.optional_vars for i in n.items if i.optional_vars]
                )
                for t in ts:
                    for x in targets(t):
                        q = f"{cls}.{x.id}" if cls else x.id
                        DEF[p, x.lineno - 1, col(p, x.lineno, x.col_offset)] = q
                        (MEMBERS[m, cls].setdefault(x.id, "f") if cls else TOP[m].add(x.id))
                if isinstance(n, (ast.For, ast.With)):
                    body(n.body, cls)
            elif isinstance(n, (ast.If, ast.Try)):
                body(n.body, cls)
                body(n.orelse, cls)
                if isinstance(n, ast.Try):
                    body(n.finalbody, cls)
                    for h in n.handlers:
                        body(h.body, cls)

    body(TREES[p].body, "")
    for n in ast.walk(TREES[p]):
        if isinstance(n, ast.ImportFrom):
            b = resolve_from(m, n)
            for al in n.names:
                imp[al.asname or al.name] = (b, al.name)
        elif isinstance(n, ast.Import):
            for al in n.names:
                imp[al.asname or al.name.split(".")[0]] = (al.name if al.asname else al.name.split(".")[0], None)


for p in ALLPY:
    index(p)


def class_of(m, e):
    if isinstance(e, ast.Subscript):
        e = e.value
    if isinstance(e, ast.Name):
        if (m, e.id) in MEMBERS:
            return (m, e.id)
        if e.id in IMPORTED[m]:
            b, n = IMPORTED[m][e.id]
            for _ in range(4):
                if (b, n) in MEMBERS:
                    return (b, n)
                if b in IMPORTED and n in IMPORTED[b]:
                    b, n = IMPORTED[b][n]
                else:
                    break
    if isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name) and e.value.id in IMPORTED[m]:
        b, n = IMPORTED[m][e.value.id]
        mod = f"{b}.{n}" if n else b
        if (mod, e.attr) in MEMBERS:
            return (mod, e.attr)
    return None


PARENTS = {k: [x for x in (class_of(k[0], b) for b in bs) if x] for k, bs in BASES.items()}

# ---------------------------------------------------------------- rules
RULES = {}  # (module, qualname) -> new last name


def last(q):
    return q[q.index("(") + 1 : -1] if q.endswith(")") else q.split(".")[-1]


BYQUAL = defaultdict(list)
for (p, _, _), q in DEF.items():
    BYQUAL[q].append(dotted(p))
for n, r in rows("symbols.tsv"):
    if len(r) != 3:
        say("ERROR bad rule", f"line {n}: {r}")
        continue
    m, q, new = full(r[0]), r[1], r[2]
    known = set(BYQUAL.get(q, ()))
    if m not in known:
        others = {o for o in known if o.startswith(PKG + ".")}
        near = {o for o in others if o.rsplit(".", 1)[0] == m.rsplit(".", 1)[0]}
        if len(near) == 1 and not (HERE / "strict").exists() and len(q) > 4 and m not in moves.values():
            say("rule found elsewhere", f"{r[0]} {q} -> in {next(iter(near))}")
            m = next(iter(near))
        else:
            say("rule without symbol", f"{r[0]} {q} {new}")
            continue
    RULES[m, q] = new


def family_rule(m, q):
    """rule for (m,q) itself or, for members, for the same member of an ancestor."""
    if (m, q) in RULES:
        return RULES[m, q]
    if "." in q.split("(")[0] and "<>" not in q:
        c, rest = q.split(".", 1)
        seen, todo = set(), list(PARENTS.get((m, c), ()))
        while todo:
            b = todo.pop()
            if b in seen:
                continue
            seen.add(b)
            if (b[0], f"{b[1]}.{rest}") in RULES:
                return RULES[b[0], f"{b[1]}.{rest}"]
            todo += PARENTS.get(b, ())
    return None


for (m, q), new in RULES.items():  # clashes with existing names
    base = q.split("(")[0]
    if not q.endswith(")"):
        if "." in q:
            c = q.split(".")[0]
            if new in MEMBERS[m, c] and (m, f"{c}.{new}") not in RULES:
                say("ERROR member clash", f"{m} {q} -> {new}")
        else:
            other = new in TOP[m] and (m, new) not in RULES
            if other:
                say("ERROR name clash", f"{m} {q} -> {new} exists")
            elif new in IMPORTED[m]:
                say("clash with import", f"{m} {q} -> {new} imported {IMPORTED[m][new]}")

OLD = {last(q) for _, q in RULES}
MODOLD = {m.rsplit(".", 1)[-1] for m in MODULES if NEWMOD[m] != m}
WATCH = OLD | MODOLD
ATTR = {last(q) for _, q in RULES if "(" not in q} | MODOLD  # module.function, x.member
KW = {last(q) for _, q in RULES if "." in q or "(" in q}
NAME = {q for _, q in RULES if "." not in q and "(" not in q} | {last(q) for _, q in RULES if "(" in q} | MODOLD
PARAM = {last(q) for _, q in RULES if "(" in q}
NOGUESS = [(re.compile(r[0]), re.compile(r[1])) for _, r in rows("noguess.tsv")]

# ---------------------------------------------------------------- occurrences
IDENT = re.compile(r"[A-Za-z_]\w*")
FSTRING = re.compile(r"^[rRbB]?[fF]")


class _L(dict):
    def __missing__(self, p):
        self[p] = locals_of(p)
        return self[p]


LOCALS = _L()


class Occ:
    __slots__ = ("col", "instring", "kind", "line", "p", "result", "text")


def locals_of(p):
    """[(first line, last line, names bound in that function)]"""
    out = []
    for f in ast.walk(TREES[p]):
        if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            a = f.args
            bound = {x.arg for x in a.posonlyargs + a.args + a.kwonlyargs + [y for y in (a.vararg, a.kwarg) if y]}
            todo = list(f.body) if not isinstance(f, ast.Lambda) else []
            while todo:
                n = todo.pop()
                if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    bound.add(n.name)
                    continue
                if isinstance(n, ast.Lambda):
                    continue
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                    bound.add(n.id)
                if isinstance(n, (ast.Import, ast.ImportFrom)):
                    bound -= {x.asname or x.name for x in n.names}
                    continue
                if isinstance(n, (ast.MatchAs, ast.MatchStar)) and n.name:
                    bound.add(n.name)
                if isinstance(n, ast.ExceptHandler) and n.name:
                    bound.add(n.name)
                todo += ast.iter_child_nodes(n)
            out.append((f.lineno if isinstance(f, ast.Lambda) else f.body[0].lineno, f.end_lineno, bound))
    return out


def occurrences(p):
    for o in occurrences_(p):
        if (
            (o.kind == "attr" and o.text not in ATTR)
            or (o.kind == "kw" and o.text not in KW)
            or (o.kind == "name" and o.text not in NAME and (p, o.line, o.col) not in DEF)
        ):
            continue
        if (
            o.kind == "name"
            and o.text not in PARAM
            and any(a <= o.line + 1 <= b and o.text in names for a, b, names in LOCALS[p])
            and (p, o.line, o.col) not in DEF
            and not lazily_imported(p, o)
        ):
            continue
        yield o


def lazily_imported(p, o):
    return False


def occurrences_(p):
    toks = list(tokenize.generate_tokens(io.StringIO(SRC[p]).readline))
    imports = []
    for n in ast.walk(TREES[p]):
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            imports.append((n.lineno, n.end_lineno, n.col_offset))
    implines = set()
    for n in ast.walk(TREES[p]):
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            implines.update(range(n.lineno, n.end_lineno + 1))
    kw = {
        (k.lineno, col(p, k.lineno, k.col_offset))
        for n in ast.walk(TREES[p])
        if isinstance(n, (ast.Call, ast.ClassDef))
        for k in n.keywords
        if k.arg
    }
    for n in ast.walk(TREES[p]):
        pass
    prev = None
    for t in toks:
        if t.type == tokenize.NAME and t.string in WATCH and t.start[0] not in implines:
            o = Occ()
            o.p, o.line, o.col, o.text = p, t.start[0] - 1, t.start[1], t.string
            o.kind = "attr" if prev and prev.string == "." else "kw" if t.start in kw else "name"
            o.instring = False
            yield o
        elif t.type == tokenize.STRING and FSTRING.match(t.string):
            depth_text = t.string
            for mm in IDENT.finditer(depth_text):
                if mm.group() in WATCH:
                    before = depth_text[: mm.start()]
                    if before.count("{") <= before.count("}"):
                        continue
                    nl = before.count("\n")
                    o = Occ()
                    o.p, o.text = p, mm.group()
                    o.line = t.start[0] - 1 + nl
                    o.col = (t.start[1] + mm.start()) if not nl else mm.start() - before.rindex("\n") - 1
                    o.kind = "attr" if before.endswith(".") else "name"
                    o.instring = True
                    yield o
        if t.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            prev = t


FIELDS = {}  # (module, Class) -> own + inherited members


def members(k, depth=0):
    out = dict(MEMBERS.get(k, {}))
    if depth < 6:
        for b in PARENTS.get(k, ()):
            out = {**members(b, depth + 1), **out}
    return out


ALLMEMBERS = {k: members(k) for k in MEMBERS}
MEMBER_OF = defaultdict(set)
for k, ms in ALLMEMBERS.items():
    for x in ms:
        MEMBER_OF[x].add(k)

edits = defaultdict(dict)  # path -> {(line,col): (oldtext,newtext,kind,target)}


def put(p, line, c, old, new, kind="", target=None):
    e = edits[p].get((line, c))
    if e and e[:2] != (old, new):
        say("ERROR double edit", f"{p}:{line + 1}:{c} {old} -> {e[1]} / {new}")
    edits[p][line, c] = (old, new, kind, target)


def static_name(m, name):
    if (m, name) in RULES:
        return RULES[m, name]
    if name in TOP.get(m, ()):
        return name
    src, nm = m, name
    for _ in range(5):
        if nm and f"{src}.{nm}" in NEWMOD and nm not in TOP.get(src, ()):
            return NEWMOD[f"{src}.{nm}"].rsplit(".", 1)[-1] if nm == name else name
        if (src, nm) in RULES:
            return RULES[src, nm] if nm == name else name
        if src in IMPORTED and nm in IMPORTED[src]:
            src, nm = IMPORTED[src][nm][0], IMPORTED[src][nm][1] or nm
        else:
            return name
    return name


def module_of(m, x):
    """The module that `x` means in module m, through imports."""
    if isinstance(x, ast.Name):
        if x.id not in IMPORTED[m]:
            return None
        b, nm = IMPORTED[m][x.id]
        at = ".".join(y for y in (b, nm) if y)
    elif isinstance(x, ast.Attribute):
        base = module_of(m, x.value)
        if base is None:
            return None
        at = f"{base}.{x.attr}"
        if at not in MODULES and x.attr in IMPORTED[base]:
            at = ".".join(y for y in IMPORTED[base][x.attr] if y)
    else:
        return None
    return at if at in MODULES else None


def lazy_names(p):
    """Names that are modules imported when first used: `x = later("a.x")`."""
    out = {}
    for n in ast.walk(TREES[p]):
        if isinstance(n, ast.Assign) and len(n.targets) == 1:
            ts = n.targets[0].elts if isinstance(n.targets[0], ast.Tuple) else [n.targets[0]]
            vs = n.value.elts if isinstance(n.value, ast.Tuple) else [n.value]
            for t, v in zip(ts, vs, strict=False):
                if (
                    isinstance(t, ast.Name)
                    and isinstance(v, ast.Call)
                    and isinstance(v.func, ast.Name)
                    and v.func.id in ("later", "lazy_module")
                    and v.args
                    and isinstance(v.args[0], ast.Constant)
                ):
                    k = f"{PKG}.{v.args[0].value}"
                    if k in NEWMOD and k.rsplit(".", 1)[-1] == t.id and NEWMOD[k].rsplit(".", 1)[-1] != t.id:
                        out[t.id] = k
    return out


def code_strings(p):
    """Positions of string constants that hold names: quoted annotations, the first argument of `cast`, `__all__`."""
    out = set()

    def add(e):
        for x in ast.walk(e) if e is not None else ():
            if isinstance(x, ast.Constant) and isinstance(x.value, str):
                out.add((x.lineno, col(p, x.lineno, x.col_offset)))

    for n in ast.walk(TREES[p]):
        if isinstance(n, ast.arg):
            add(n.annotation)
        elif isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
            add(n.returns)
        elif isinstance(n, ast.AnnAssign):
            add(n.annotation)
            if isinstance(n.annotation, ast.Name) and n.annotation.id == "TypeAlias":
                add(n.value)
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "cast" and n.args:
            add(n.args[0])
        elif (
            (isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in n.targets))
            or (isinstance(n, ast.Assign) and isinstance(n.value, ast.Subscript))
            or (isinstance(n, ast.Assign) and isinstance(n.value, ast.BinOp))
        ):
            add(n.value)
    return out


def run():
    py = Pyright(str(TREE))
    t0 = time.time()
    total = 0
    unresolved = []
    import hashlib
    import pickle

    stamp = hashlib.sha256(
        b"".join(str(p.relative_to(TREE)).encode() + SRC[p].encode() for p in sorted(SRC))
    ).hexdigest()
    store = HERE / "lspcache" / stamp
    cache = pickle.loads(store.read_bytes()) if store.exists() else {}
    opened = set()

    def ask(method, p, line, c):
        k = (method, str(p.relative_to(TREE)), line, c)
        if k in cache:
            return k, None
        if p not in opened:
            py.open(str(p))
            opened.add(p)
        return k, py.start(
            "textDocument/" + method,
            {"textDocument": {"uri": "file://" + str(p)}, "position": {"line": line, "character": c}},
        )

    def get(k, i):
        if i is not None:
            cache[k] = [
                (
                    os.path.relpath(path_of(x["uri"]), TREE),
                    x["range"]["start"]["line"],
                    x["range"]["start"]["character"],
                )
                for x in py.wait(i) or []
            ]
        return [(TREE / x[0] if not x[0].startswith("..") else Path(x[0]), x[1], x[2]) for x in cache[k]]

    for p in PY:
        occs = list(occurrences(p))
        if not occs:
            continue
        ids = []
        for o in occs:
            k = (o.p, o.line, o.col)
            if k in DEF:
                o.result = [(o.p, o.line, o.col)]
                ids.append(None)
            else:
                ids.append(ask("definition", o.p, o.line, o.col))
        for o, i in zip(occs, ids, strict=False):
            if i is not None:
                o.result = get(*i)
        total += len(occs)
        later = lazy_names(p)
        for o in occs:
            if (o.p, o.line, o.col) in DEF and o.text in later:
                put(p, o.line, o.col, o.text, NEWMOD[later[o.text]].rsplit(".", 1)[-1], "name")
                continue
            news, _unknown = set(), False
            for loc in o.result:
                q = DEF.get(loc)
                if q is None:
                    if loc[1:] == (0, 0) and loc[0].suffix == ".py" and str(loc[0]).startswith(str(TREE)):
                        mod = dotted(loc[0])
                        if mod in NEWMOD and o.text == mod.rsplit(".", 1)[-1]:
                            if o.kind == "attr" and NEWMOD[mod] != mod:  # a.b.mod
                                par, npar = mod.rsplit(".", 1)[0], NEWMOD[mod]
                                np_ = moved(par)
                                news.add(
                                    npar[len(np_) + 1 :]
                                    if npar.startswith(np_ + ".")
                                    else (say("ERROR module attribute", f"{p}:{o.line + 1} {o.text}") or o.text)
                                )
                            else:
                                news.add(NEWMOD[mod].rsplit(".", 1)[-1])
                            continue
                    news.add(o.text)
                    continue
                if last(q) != o.text:
                    news.add(o.text)
                    continue
                new = family_rule(dotted(loc[0]), q)
                news.add(new or o.text)
            if not o.result:
                unresolved.append(o)
                continue
            real = news - {o.text}
            if len(news) > 1:
                say("conflict", f"{p.relative_to(TREE)}:{o.line + 1}:{o.col} {o.text} -> {sorted(news)}")
            if len(real) == 1 and len(news) == 1:
                put(p, o.line, o.col, o.text, real.pop(), o.kind)
        # monkeypatch.setattr(module, "name"), getattr(Class, "name")
        for n in ast.walk(TREES[p]):
            if (
                isinstance(n, ast.Tuple)
                and len(n.elts) >= 2
                and isinstance(n.elts[0], (ast.Name, ast.Attribute))
                and isinstance(n.elts[1], ast.Constant)
                and n.elts[1].value in OLD
            ):
                at = module_of(dotted(p), n.elts[0])
                a = n.elts[1]
                if at and (a.value in TOP[at] or a.value in IMPORTED[at]) and static_name(at, a.value) != a.value:
                    put(p, a.lineno - 1, col(p, a.lineno, a.col_offset) + 1, a.value, static_name(at, a.value), "str")
            if (
                isinstance(n, ast.Call)
                and len(n.args) >= 2
                and isinstance(n.args[1], ast.Constant)
                and isinstance(n.args[1].value, str)
                and (n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", ""))
                in ("setattr", "getattr", "hasattr", "delattr", "object")
            ):
                name, x, m = n.args[1].value, n.args[0], dotted(p)
                if name not in OLD:
                    continue
                new = None
                chain = []
                at = module_of(m, x)
                if at:
                    if static_name(at, name) != name:
                        a = n.args[1]
                        put(p, a.lineno - 1, col(p, a.lineno, a.col_offset) + 1, name, static_name(at, name), "str")
                    continue
                while isinstance(x, ast.Attribute):
                    chain.insert(0, x.attr)
                    x = x.value
                if isinstance(x, ast.Name) and x.id in IMPORTED[m]:
                    b, nm = IMPORTED[m][x.id]
                    at = ".".join([y for y in (b, nm) if y] + chain)
                    if at in MODULES:
                        new = static_name(at, name)
                    elif at.rpartition(".")[0] in MODULES:
                        new = family_rule(at.rpartition(".")[0], f"{at.rpartition('.')[2]}.{name}") or name
                elif isinstance(x, ast.Name) and (m, x.id) in MEMBERS:
                    new = family_rule(m, f"{x.id}.{name}") or name
                if new is None:
                    say("setattr() unresolved", f"{p.relative_to(TREE)}:{n.lineno} {ast.unparse(n)[:80]}")
                elif new != name:
                    a = n.args[1]
                    c = col(p, a.lineno, a.col_offset) + 1
                    put(p, a.lineno - 1, c, name, new, "str")
        # dataclasses.replace
        for n in ast.walk(TREES[p]):
            if (
                isinstance(n, ast.Call)
                and n.args
                and (
                    (isinstance(n.func, ast.Name) and n.func.id == "replace")
                    or (isinstance(n.func, ast.Attribute) and n.func.attr in ("replace", "_replace"))
                )
                and any(k.arg in OLD for k in n.keywords)
            ):
                x = n.args[0]
                l, c = x.end_lineno, col(p, x.end_lineno, x.end_col_offset) - 1
                while c >= 0 and not (LINES[p][l - 1][c].isalnum() or LINES[p][l - 1][c] == "_"):
                    c -= 1
                cls = None
                if isinstance(x, (ast.Name, ast.Attribute)):
                    for loc in get(*ask("typeDefinition", p, l - 1, c)):
                        q = DEF.get(loc)
                        if q:
                            cls = (dotted(loc[0]), q)
                ks = [k for k in n.keywords if k.arg]
                cands = (
                    [cls]
                    if cls and cls in ALLMEMBERS
                    else [k for k, ms in ALLMEMBERS.items() if all(y.arg in ms for y in ks)]
                )
                for y in ks:
                    if y.arg not in OLD:
                        continue
                    new = {family_rule(k[0], f"{k[1]}.{y.arg}") or y.arg for k in cands}
                    where = (y.lineno - 1, col(p, y.lineno, y.col_offset))
                    done.add((p, *where))
                    if len(new) == 1:
                        v = new.pop()
                        if v != y.arg:
                            put(p, *where, y.arg, v, "kw")
                    else:
                        say("replace() unresolved", f"{p.relative_to(TREE)}:{y.lineno} {y.arg} {cands}")
        if p in opened:
            py.close(str(p))
    store.parent.mkdir(exist_ok=True)
    store.write_bytes(pickle.dumps(cache))
    # heuristics for what pyright did not resolve
    newof = defaultdict(set)
    for (m, q), new in RULES.items():
        if "." in q or "(" in q:
            newof[last(q)].add(new)
    for o in unresolved:
        where = f"{o.p.relative_to(TREE)}:{o.line + 1}:{o.col}"
        if (o.p, o.line, o.col) in done or (o.instring and o.kind != "attr"):
            continue
        if keyword.issoftkeyword(o.text):
            continue
        if o.kind == "name":  # code that pyright takes for unreachable: `else` of `if TYPE_CHECKING`
            new = static_name(dotted(o.p), o.text)
            if new != o.text and o.instring is False:
                put(o.p, o.line, o.col, o.text, new, o.kind)
            continue
        if o.text not in OLD:
            continue
        if not newof[o.text] or hasattr(str, o.text):
            continue
        line = LINES[o.p][o.line]
        if o.kind == "attr" and re.search(
            rf"\b(?:OPS|ops|options|arguments|define\([^)]*\)|lib|library|np|torch|F|build|b|tc)\.{o.text}", line
        ):
            continue
        if any(a.search(str(o.p.relative_to(TREE))) and b.search(o.text) for a, b in NOGUESS):
            continue
        plain = [k for k in MEMBER_OF[o.text] if not family_rule(k[0], f"{k[1]}.{o.text}")]
        if (
            len(newof[o.text]) == 1
            and (not plain or (str(o.p.relative_to(TREE)).startswith("tests") and False))
            and not hasattr(str, o.text)
            and not hasattr(list, o.text)
        ):
            new = next(iter(newof[o.text]))
            put(o.p, o.line, o.col, o.text, new, o.kind)
            say("guessed", f"{where} {o.text} -> {new}: {LINES[o.p][o.line].strip()[:100]}")
        else:
            say(
                "unresolved",
                f"{where} {o.text} -> {sorted(newof[o.text])}{' or stays' if plain else ''}: {LINES[o.p][o.line].strip()[:100]}",
            )
    py.p.kill()
    print(f"{total} occurrences in {time.time() - t0:.0f} s", file=sys.stderr)


done = set()


# ---------------------------------------------------------------- imports
def relative(here_new, is_pkg, target):
    """`target` as a relative module for a file of the package."""
    base = here_new.split(".") if is_pkg else here_new.split(".")[:-1]
    tgt = target.split(".")
    k = 0
    while k < len(base) and k < len(tgt) and base[k] == tgt[k]:
        k += 1
    return "." * (len(base) - k + 1) + ".".join(tgt[k:])


def import_edits(p):
    m = dotted(p)
    new_m = NEWMOD[m]
    spans = []
    for n in ast.walk(TREES[p]):
        if isinstance(n, ast.ImportFrom):
            b = resolve_from(m, n)
            near = f"{m.rsplit('.', 1)[0]}.{b}"
            if (
                not n.level and near in NEWMOD and m.startswith("tests.") and NEWMOD[near] != near
            ):  # a neighbor by its plain name
                old = f"from {b} import"
                c = LINES[p][n.lineno - 1].index(old)
                spans.append((n.lineno, c + 5, n.lineno, c + 5 + len(b), NEWMOD[near].rsplit(".", 1)[-1]))
                continue
            if b.split(".")[0] not in (PKG, "tests", "benchmarks", "examples"):
                continue
            groups = defaultdict(list)
            changed = moved(b) != b or (new_m != m and n.level)
            for al in n.names:
                sub = f"{b}.{al.name}"
                if (sub in MODULES and al.name not in TOP.get(b, ())) or (sub in FOLDERS and sub not in MODULES):
                    t = NEWMOD.get(sub, moved(sub))
                    par, base = t.rsplit(".", 1)
                    if t != sub:
                        changed = True
                    groups[par].append((base, al.asname))
                else:
                    # follow re-exports: rule of the defining module
                    src, name = b, al.name
                    for _ in range(5):
                        if (src, name) in RULES or name in TOP.get(src, ()):
                            break
                        if src in IMPORTED and name in IMPORTED[src]:
                            src, name = IMPORTED[src][name][0], IMPORTED[src][name][1] or name
                        else:
                            break
                    new = RULES.get((src, name), al.name) if name == al.name else al.name
                    if new != al.name:
                        changed = True
                    groups[moved(b) if b not in NEWMOD else NEWMOD[b]].append(
                        (new, al.asname if al.asname != new else None)
                    )
            if not changed:
                continue
            lines = []
            for g, names in groups.items():
                where = relative(new_m, m in PACKAGES, g) if n.level else g
                ns = ", ".join(x + (f" as {a}" if a else "") for x, a in dict.fromkeys(names))
                stmt = f"from {where} import {ns}"
                if len(stmt) > 115:
                    stmt = f"from {where} import ({ns})"
                lines.append(stmt)
            ind = " " * n.col_offset
            spans.append((n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, ("\n" + ind).join(lines)))
        elif isinstance(n, ast.Import):
            for al in n.names:
                if al.name in NEWMOD and NEWMOD[al.name] != al.name:
                    l = LINES[p][n.lineno - 1]
                    c = l.index(al.name)
                    spans.append((n.lineno, c, n.lineno, c + len(al.name), NEWMOD[al.name]))
    return spans


# ---------------------------------------------------------------- text: strings, comments, docs
def pathmap():
    out = {}
    for m, n in NEWMOD.items():
        if m == n:
            continue
        init = m in PACKAGES
        o, w = m.replace(".", "/"), n.replace(".", "/")
        if not init:
            out[o + ".py"] = w + ".py"
    for o, w in folder_moves.items():
        out[o.replace(".", "/")] = w.replace(".", "/")
    return out


TEXT_MODULE = re.compile(
    r"\b(?P<m>(?:tensor_comprehensions|tests|benchmarks)(?:\.[A-Za-z_]\w*)+)(?::(?P<f>[A-Za-z_]\w*))?"
)


def text_modules(s):
    def sub(mm):
        parts, f = mm["m"].split("."), mm["f"]
        if f and mm["m"] in NEWMOD:
            return f"{NEWMOD[mm['m']]}:{RULES.get((mm['m'], f), f)}"
        tail = f":{f}" if f else ""
        for k in range(len(parts), 1, -1):
            m = ".".join(parts[:k])
            if m in NEWMOD or m in folder_moves:
                new = NEWMOD.get(m) or moved(m)
                rest = parts[k:]
                old = ".".join(rest)
                if rest:
                    rest[0] = static_name(m, rest[0])
                if len(rest) == 2 and (m, ".".join(parts[k:])) in RULES:
                    rest[1] = RULES[m, old]
                return ".".join([new, *rest]) + tail
        return mm.group()

    return TEXT_MODULE.sub(sub, s)


PATHS = pathmap()
PATH_RE = re.compile(r"(?<![\w/.])(?:tensor_comprehensions/)?[a-z_]+(?:/[a-z_0-9]+)*(?:\.py\b)?")


def text_paths(s):
    def sub(mm):
        t = mm.group()
        if "/" not in t:
            return t
        for pre in ("", PKG + "/", "tests/"):
            if pre + t in PATHS:
                return PATHS[pre + t][len(pre) :] if PATHS[pre + t].startswith(pre) else PATHS[pre + t]
        for o in sorted(PATHS, key=len, reverse=True):
            for pre in ("", PKG + "/", "tests/"):
                if not o.endswith(".py") and (pre + t).startswith(o + "/"):
                    r = PATHS[o] + (pre + t)[len(o) :]
                    return r[len(pre) :] if r.startswith(pre) else r
        return t

    return PATH_RE.sub(sub, s)


OLDMOD = {n: m for m, n in NEWMOD.items()}
FROM_RE = re.compile(r"from (tensor_comprehensions[\w.]*) import ([\w, ]+)")


def text_imports(s):
    """Code in strings and in Markdown: imports, and the names that they bring, word by word."""
    renames = {}

    def sub(mm):
        b = OLDMOD.get(mm.group(1), mm.group(1))
        groups = defaultdict(list)  # `text_modules` ran before
        for part in mm.group(2).split(","):
            w = part.split()
            if not w:
                continue
            sub_ = f"{b}.{w[0]}"
            rest = (" " + " ".join(w[1:])) if len(w) > 1 else ""
            if sub_ in NEWMOD and w[0] not in TOP.get(b, ()):
                par, base = NEWMOD[sub_].rsplit(".", 1)
                groups[par].append(base + rest)
                if base != w[0] and not rest:
                    renames[w[0]] = base
                MODS[w[2] if rest else base] = sub_
            else:
                src, name = b, w[0]
                for _ in range(5):
                    if (src, name) in RULES or name in TOP.get(src, ()):
                        break
                    if src in IMPORTED and name in IMPORTED[src]:
                        src, name = IMPORTED[src][name][0], IMPORTED[src][name][1] or name
                    else:
                        break
                new = RULES.get((src, name), w[0])
                if new != w[0] and not rest:
                    renames[w[0]] = new
                groups[NEWMOD.get(b, moved(b))].append(new + rest)
        return "; ".join(f"from {g} import {', '.join(ns)}" for g, ns in groups.items())

    MODS = {}
    s = FROM_RE.sub(sub, s)
    for o, n in renames.items():
        s = re.sub(rf"(?<![\w.]){o}(?![\w])(?!\s*=[^=])", n, s)
    for alias, m in MODS.items():
        s = re.sub(
            rf"(?<![\w.]){alias}\.([A-Za-z_]\w*)", lambda mm: f"{alias}.{RULES.get((m, mm.group(1)), mm.group(1))}", s
        )
    return s


TICK = re.compile(r"`([A-Za-z_][\w.]*)(\([^`]*\))?`")
GLOBAL = defaultdict(set)
for (m, q), new in RULES.items():
    GLOBAL[last(q)].add(new)
KEEPS = defaultdict(bool)
for (p, _, _), q in DEF.items():
    if p in PY and dotted(p).startswith(PKG) and "(" not in q and not family_rule(dotted(p), q):
        KEEPS[last(q)] = True


def ticks(s, m):
    def one(name):
        imp = IMPORTED.get(m, {})
        # same module first
        if (m, name) in RULES:
            return RULES[m, name]
        if name in imp:
            src, nm = imp[name]
            sub = f"{src}.{nm}"
            if sub in NEWMOD:
                return NEWMOD[sub].rsplit(".", 1)[-1]
            return RULES.get((src, nm), name)
        if name in TOP.get(m, ()):
            return name
        mine = {new for (mm_, q), new in RULES.items() if mm_ == m and last(q) == name}
        if len(mine) == 1 and not any(
            name == last(q)
            for (pp, _, _), q in DEF.items()
            if dotted(pp) == m and "(" not in q and not family_rule(m, q)
        ):
            return mine.pop()
        if len(GLOBAL[name]) == 1 and not KEEPS[name] and len(name) > 3:
            return next(iter(GLOBAL[name]))
        return name

    def sub(mm):
        n, call = mm.group(1), mm.group(2) or ""
        parts = n.split(".")
        if len(parts) == 1:
            return f"`{one(n)}{call}`"
        # Class.member or module.name
        for k, _mem in [(f"{parts[0]}.{parts[1]}", parts)]:
            hits = {(m_, new) for (m_, q), new in RULES.items() if q == k}
            own = {h for h in hits if h[0] == m} or hits
            cls = one(parts[0])
            if len({h[1] for h in own}) == 1:
                return "`" + ".".join([cls, next(iter(own))[1], *parts[2:]]) + call + "`"
        mods = [x for x in MODULES if x.startswith(PKG) and x.endswith("." + parts[0])]
        [x for x in MODULES if x.startswith(PKG) and x.endswith("." + ".".join(parts[:-1]))]
        if len(parts) == 2:
            near = [x for x in mods if x.rsplit(".", 1)[0] == m.rsplit(".", 1)[0]] or mods
            for x in near:
                if parts[1] in TOP.get(x, ()) or (x, parts[1]) in RULES:
                    return f"`{NEWMOD[x].rsplit('.', 1)[-1]}.{RULES.get((x, parts[1]), parts[1])}{call}`"
            whole = [x for x in MODULES if x.startswith(PKG) and x.endswith("." + n)]
            if len(whole) == 1 and NEWMOD[whole[0]] != whole[0]:
                return "`" + ".".join(NEWMOD[whole[0]].split(".")[1:]) + call + "`"
        return mm.group()

    return TICK.sub(sub, s)


def plain_text(s, m):
    return ticks(text_imports(text_paths(text_modules(s))), m)


def string_rules():
    out = []
    for n, r in rows("strings.tsv"):
        if len(r) < 3:
            say("ERROR bad string rule", f"{n}: {r}")
            continue
        out.append((n, re.compile(r[0]), re.compile(r[1], re.M), r[2].replace("\\n", "\n")))
    return out


def apply_py(p):
    src = SRC[p]
    lines = LINES[p]
    starts = [0]
    for l in lines:
        starts.append(starts[-1] + len(l) + 1)
    out = []  # (start, end, new)
    for (l, c), (old, new, _kind, t) in edits[p].items():
        s = starts[l] + c
        assert src[s : s + len(old)] == old, (p, l, c, old, src[s : s + 20])
        out.append((s, s + len(old), new))
    for l1, c1, l2, c2, new in import_edits(p):
        out.append((starts[l1 - 1] + col(p, l1, c1), starts[l2 - 1] + col(p, l2, c2), new))
    [(a, b) for a, b, _ in out]
    m = dotted(p)
    toks = list(tokenize.generate_tokens(io.StringIO(src).readline))
    names_in = code_strings(p)
    for i, t in enumerate(toks):
        if t.type in (tokenize.STRING, tokenize.COMMENT):
            a, b = starts[t.start[0] - 1] + t.start[1], starts[t.end[0] - 1] + t.end[1]
            inner = sorted(x for x in out if a <= x[0] and x[1] <= b)
            if not inner:
                new = plain_text(t.string, m)
                if t.type == tokenize.STRING and t.start in names_in:
                    new = re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda mm: static_name(m, mm.group()), t.string)
                if t.type == tokenize.STRING and i >= 2 and toks[i - 2].string in ("later", "lazy_module"):
                    k = f"{PKG}.{ast.literal_eval(t.string)}"
                    if k in NEWMOD:
                        new = '"' + NEWMOD[k][len(PKG) + 1 :] + '"'
                if (
                    t.type == tokenize.STRING and m == PKG and i and toks[i - 1].string == ":" and t.string[0] == '"'
                ):  # homes of lazy names
                    k = f"{PKG}.{t.string[1:-1]}"
                    if k in NEWMOD:
                        new = '"' + NEWMOD[k][len(PKG) + 1 :] + '"'
                if new != t.string:
                    out.append((a, b, new))
    out.sort()
    res, at = [], 0
    for a, b, new in out:
        if a < at:
            say("ERROR overlap", f"{p}:{src[a:b]}")
            continue
        res += [src[at:a], new]
        at = b
    res.append(src[at:])
    return "".join(res)


IZE = re.compile(
    r"(normal|legal|initial|special|recogn|vector|parenthes|optim|factor|privat|util|quant|synchron|serial|minim|linear|amort|maxim|summar|organ|general|local|material|real|token|capital|custom|final|visual|stabil|symbol|categor|parametr|polynomial|scalar|parallel|canonical|discret|characteri|rational)is(e|es|ed|ing|ation|ations|er|ers|able)(?![a-z])",
    re.I,
)
SPELL = [
    ("eighbour", "eighbor"),
    ("ehaviour", "ehavior"),
    ("olour", "olor"),
    ("odelled", "odeled"),
    ("ournalled", "ournaled"),
    ("ravelled", "raveled"),
    ("abelled", "abeled"),
    ("honoured", "honored"),
]


def ize(s):
    s = IZE.sub(lambda m: m.group(1) + ("iz" if m.group(1)[-1].islower() else "IZ") + m.group(2), s)
    for a, b in SPELL:
        s = s.replace(a, b)
    return s


def shadows():
    for p, es in edits.items():
        for (line, _c), (old, new, kind, _) in es.items():
            if kind == "name":
                for a, b, names in LOCALS[p]:
                    if a <= line + 1 <= b and new in names and old not in names:
                        say("shadowed by a local name", f"{p.relative_to(TREE)}:{line + 1} {old} -> {new}")
                        break


def main():
    [k for k in report if k.startswith("ERROR")]
    if "--check" not in sys.argv:
        run()
        shadows()
    texts = {}
    for p in PY:
        texts[p] = apply_py(p)
    others = [
        p
        for p in files
        if p.suffix in (".md", ".toml", ".yml", ".yaml", ".json", ".txt", ".lark", ".proto", ".tc")
        or p.name in ("Makefile", "run", ".gitignore")
    ]
    for p in others:
        try:
            s = p.read_text()
        except UnicodeDecodeError:
            continue
        if p.suffix == ".json":
            new = text_paths(text_modules(s)) if len(s) < 200000 and "tables" not in p.name else s
        elif p.suffix == ".tc":
            new = s
        else:
            new = plain_text(s, "")
        texts[p] = new
    rules = string_rules()
    used = defaultdict(int)
    for p, s in texts.items():
        rel = p.relative_to(TREE).as_posix()
        for n, where, pat, new in rules:
            if where.search(rel):
                s, k = pat.subn(new, s)
                used[n] += k
        texts[p] = s
        texts[p] = ize(s) if p.suffix in (".py", ".md", ".lark", ".toml", ".yml", ".tc") else s
    for n, where, pat, new in rules:
        if not used[n]:
            say("string rule without effect", f"line {n}: {where.pattern} {pat.pattern}")
    if "--dry" not in sys.argv and "--check" not in sys.argv:
        for p, s in texts.items():
            if s != p.read_text():
                p.write_text(s)
        move()
    if "--dry" not in sys.argv and "--check" not in sys.argv:
        for f in (HERE / "new_files").rglob("*"):
            if f.is_file():
                w = TREE / f.relative_to(HERE / "new_files")
                if w.exists():
                    say("new file exists already", str(w))
                    continue
                w.parent.mkdir(parents=True, exist_ok=True)
                w.write_text(f.read_text())
    order = sorted(report)
    with open(HERE / "report.txt", "w") as o:
        for k in order:
            o.write(f"=== {k}: {len(report[k])}\n")
            o.writelines(f"  {x}\n" for x in report[k])
    for k in order:
        print(f"{k}: {len(report[k])}")


def move():
    def git(*a):
        subprocess.run(["git", "-C", str(TREE), *a], check=True, stdout=subprocess.DEVNULL)

    plan = []
    for m, n in NEWMOD.items():
        if m == n:
            continue
        o = MODULES[m]
        if m in PACKAGES:
            w = TREE / n.replace(".", "/") / "__init__.py"
        elif n + ".__init__" in NEWMOD.values():
            w = TREE / (n.replace(".", "/") + "/__init__.py")
        else:
            w = TREE / (n.replace(".", "/") + ".py")
        plan.append((o, w))
    for f in files:  # other files of moved folders
        if f.suffix == ".py" or not f.exists():
            continue
        par = ".".join(f.relative_to(TREE).parent.parts)
        hit = next(
            (o for o in sorted(folder_moves, key=len, reverse=True) if par == o or par.startswith(o + ".")), None
        )
        if hit:
            plan.append((f, TREE / (folder_moves[hit] + par[len(hit) :]).replace(".", "/") / f.name))
    for n, r in rows("files.tsv"):
        if (TREE / r[0]).exists():
            plan.append((TREE / r[0], TREE / r[1]))
        else:
            say("missing file", r[0])
    tracked = set(
        subprocess.run(["git", "-C", str(TREE), "ls-files"], capture_output=True, text=True).stdout.split("\n")
    )
    temp = []
    for i, (o, w) in enumerate(plan):  # by way of temporary names: swaps
        t = o.with_name(f"{o.name}.moving{i}")
        rel = o.relative_to(TREE).as_posix()
        (git("mv", rel, t.relative_to(TREE).as_posix()) if rel in tracked else os.rename(o, t))
        temp.append((t, w, rel in tracked))
    for t, w, tr in temp:
        w.parent.mkdir(parents=True, exist_ok=True)
        (git("mv", t.relative_to(TREE).as_posix(), w.relative_to(TREE).as_posix()) if tr else os.rename(t, w))
    for d in sorted({o.parent for o, _ in plan}, key=lambda d: -len(d.parts)):
        import shutil

        while d != TREE and d.exists() and not any(x.name != "__pycache__" for x in d.iterdir()):
            shutil.rmtree(d)
            d = d.parent


if __name__ == "__main__":
    main()
