# ruff: noqa: E741, SIM115
"""A small LSP client for pyright."""

import itertools
import json
import os
import subprocess
import sys
import threading
from urllib.parse import unquote, urlparse


class Pyright:
    def __init__(self, root):
        self.root = root
        self.p = subprocess.Popen(
            ["pyright-langserver", "--stdio"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=root,
        )
        self.ids = itertools.count(1)
        self.pending = {}
        self.lock = threading.Lock()
        self.cond = threading.Condition()
        self.results = {}
        self.diags = {}
        threading.Thread(target=self._read, daemon=True).start()
        uri = "file://" + root
        self.call(
            "initialize",
            {
                "processId": os.getpid(),
                "rootUri": uri,
                "workspaceFolders": [{"uri": uri, "name": "w"}],
                "capabilities": {
                    "workspace": {"configuration": True, "workspaceFolders": True},
                    "textDocument": {"definition": {"linkSupport": False}, "hover": {"contentFormat": ["plaintext"]}},
                },
            },
        )
        self.send("initialized", {})

    def _write(self, msg):
        b = json.dumps(msg).encode()
        with self.lock:
            self.p.stdin.write(b"Content-Length: %d\r\n\r\n" % len(b) + b)
            self.p.stdin.flush()

    def send(self, method, params):
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    def start(self, method, params):
        i = next(self.ids)
        self._write({"jsonrpc": "2.0", "id": i, "method": method, "params": params})
        return i

    def wait(self, i, timeout=900):
        with self.cond:
            if not self.cond.wait_for(lambda: i in self.results or self.p.poll() is not None, timeout):
                raise TimeoutError(i)
            if i not in self.results:
                raise RuntimeError("pyright ended: run again")
            r = self.results.pop(i)
        return r.get("result")

    def call(self, method, params):
        return self.wait(self.start(method, params))

    def _read(self):
        f = self.p.stdout
        while True:
            n = 0
            while True:
                l = f.readline()
                if not l:
                    self.p.wait()
                    with self.cond:
                        self.cond.notify_all()
                    return
                if l == b"\r\n":
                    break
                if l.lower().startswith(b"content-length:"):
                    n = int(l.split(b":")[1])
            m = json.loads(f.read(n))
            if "method" in m:
                if "id" in m:
                    res = None
                    if m["method"] == "workspace/configuration":
                        res = [self.config(x.get("section")) for x in m["params"]["items"]]
                    self._write({"jsonrpc": "2.0", "id": m["id"], "result": res})
                elif m["method"] == "textDocument/publishDiagnostics":
                    self.diags[path_of(m["params"]["uri"])] = m["params"]["diagnostics"]
            else:
                with self.cond:
                    self.results[m["id"]] = m
                    self.cond.notify_all()

    def config(self, section):
        if section == "python":
            return {"pythonPath": sys.executable, "analysis": self.analysis()}
        if section == "python.analysis":
            return self.analysis()
        return {}

    def analysis(self):
        return {
            "diagnosticMode": "openFilesOnly",
            "typeCheckingMode": "basic",
            "useLibraryCodeForTypes": True,
            "autoSearchPaths": True,
            "indexing": False,
        }

    def open(self, path):
        self.send(
            "textDocument/didOpen",
            {
                "textDocument": {
                    "uri": "file://" + path,
                    "languageId": "python",
                    "version": 1,
                    "text": open(path).read(),
                }
            },
        )

    def close(self, path):
        self.send("textDocument/didClose", {"textDocument": {"uri": "file://" + path}})


def path_of(uri):
    return unquote(urlparse(uri).path)
