# ruff: noqa: E741
"""Break comments and docstrings that a rename made longer than 120 columns."""

import io
import subprocess
import sys
import tokenize
from pathlib import Path

root = Path(sys.argv[1])
for _ in range(6):
    bad = {}
    r = subprocess.run(
        ["ruff", "check", ".", "--select", "E501", "--output-format", "concise"],
        cwd=root,
        capture_output=True,
        text=True,
    ).stdout
    for l in r.splitlines():
        p = l.split(":")
        if len(p) > 3 and "E501" in l:
            bad.setdefault(p[0], []).append(int(p[1]))
    if not bad:
        break
    for f, lines in bad.items():
        p = root / f
        s = p.read_text()
        L = s.split("\n")
        docs = set()
        for t in tokenize.generate_tokens(io.StringIO(s).readline):
            if t.type == tokenize.STRING and t.string.lstrip("rRfFbB").startswith('"""'):
                docs |= set(range(t.start[0], t.end[0] + 1))
        for n in sorted(lines, reverse=True):
            l = L[n - 1]
            st = l.lstrip()
            ind = l[: len(l) - len(st)]
            if n in docs:
                cut = l.rfind(" ", 0, 119)
                if cut <= len(ind) + 4:
                    continue
                rest = l[cut + 1 :]
                nxt = L[n] if n < len(L) else ""
                ends = l.rstrip().endswith('"""')
                cont = ind
                if (
                    not ends
                    and (n + 1) in docs
                    and nxt.strip()
                    and nxt.strip() != '"""'
                    and nxt[: len(nxt) - len(nxt.lstrip())] == ind
                ):
                    L[n - 1 : n + 1] = [l[:cut], ind + rest + " " + nxt.strip()]
                else:
                    L[n - 1 : n] = [l[:cut], cont + rest]
            elif st.startswith("#"):
                cut = l.rfind(" ", 0, 119)
                L[n - 1 : n] = [l[:cut], ind + "# " + l[cut + 1 :]]
            elif any("# fmt: skip" in x for x in L[n - 1 : n + 8]):
                cut = l.rfind(", ", 0, 118)
                if cut > len(ind):
                    L[n - 1 : n] = [l[: cut + 1], ind + l[cut + 2 :]]
            elif st[:1] == '"' or st[:2] == 'f"':
                pre = st[: st.index('"')]
                depth = 0
                cut = None
                for i, ch in enumerate(l[:116]):
                    depth += (ch == "{") - (ch == "}")
                    if ch == " " and not depth and i > len(ind) + 10:
                        cut = i
                if cut:
                    L[n - 1 : n] = [l[: cut + 1] + '"', ind + pre + '"' + l[cut + 1 :]]
        p.write_text("\n".join(L))
