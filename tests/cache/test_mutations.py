"""One thing that a forward can read is another at the second launch: what was kept is not used, or gives the same.

Each case is a small model and an edit of its source. The first launch keeps what it can, the second is of the edited
source, and its numbers are compared with those of a launch without a cache. A case that says `kept=False` reads what no
edit of the source changes, such as the clock: nothing may be kept of it.
"""

# ruff: noqa: E501  (sources are in one string)
from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.cache.launches import Launches

MODEL = """
import abc
import collections
import contextlib
import contextvars
import dataclasses
import datetime
import enum
import functools
import inspect
import itertools
import locale
import logging
import math
import operator
import os
import random
import string
import sys
import threading
import time
import traceback
import types
import typing
import warnings
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

TOP

class Base(nn.Module):
    pass

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        INIT

    def forward(self, x):
        x = self.lin(x)
        BODY
        return (x * 1.0).sum()

class Config:
    pass
"""


@dataclass(frozen=True)
class Case:
    """What is put into the model, and the edit of it.

    Attributes:
        body: of forward.
        top: of the module.
        init: of the model's `__init__`.
        kept: whether the first launch may keep something.
    """

    body: str
    old: str
    new: str
    top: str = ""
    init: str = "pass"
    kept: bool = True

    def source(self) -> str:
        """The module."""
        text = MODEL.replace("TOP", self.top).replace("        INIT", _indented(self.init))
        return text.replace("        BODY", _indented(self.body))


def _indented(text: str) -> str:
    return "\n".join(f"        {line}" for line in text.strip("\n").splitlines())


CASES = {
    "number in a nested list of an attribute": Case("x = x * self.a['k'][1][0]", "[2.0]", "[2.5]",
        init="self.a = {'k': [1.0, [2.0]]}"),
    "key of a dict": Case("x = x * len([k for k in self.a if k > 1])", "1: 0, 2: 0", "2: 0, 3: 0",
        init="self.a = {1: 0, 2: 0}"),
    "order of a dict": Case("x = x * next(iter(self.a))", "{2: 0, 3: 0}", "{3: 0, 2: 0}", init="self.a = {2: 0, 3: 0}"),
    "dataclass field": Case("x = x * self.c.f", "D(2.0)", "D(3.0)", init="self.c = D(2.0)",
        top="@dataclasses.dataclass\nclass D:\n    f: float = 1.0\n"),
    "dataclass default": Case("x = x * self.c.f", "= 2.0", "= 3.0", init="self.c = D()",
        top="@dataclasses.dataclass\nclass D:\n    f: float = 2.0\n"),
    "frozen dataclass with slots": Case("x = x * self.c.f", "D(2.0)", "D(3.0)", init="self.c = D(2.0)",
        top="@dataclasses.dataclass(frozen=True, slots=True)\nclass D:\n    f: float = 1.0\n"),
    "namedtuple": Case("x = x * self.c.f", "D(2.0)", "D(3.0)", init="self.c = D(2.0)",
        top="D = collections.namedtuple('D', 'f')"),
    "enum value": Case("x = x * E.A.value", "A = 2", "A = 3", top="class E(enum.Enum):\n    A = 2\n"),
    "enum member": Case("x = x * self.e.value", "E.A", "E.B", init="self.e = E.A",
        top="class E(enum.Enum):\n    A = 2\n    B = 3\n"),
    "enum member of other value": Case("x = x * self.e.value", "A = 2", "A = 5", init="self.e = E.A",
        top="class E(enum.Enum):\n    A = 2\n    B = 3\n"),
    "enum method": Case("x = x * self.e.of()", "return 2", "return 3", init="self.e = E.A",
        top="class E(enum.Enum):\n    A = 2\n    def of(self):\n        return 2\n"),
    "enum member used by a name": Case("x = x * T[self.e]", "A: 2.0", "A: 3.0", init="self.e = E.A",
        top="class E(enum.Enum):\n    A = 2\nT = {E.A: 2.0}\n"),
    "partial's argument": Case("x = self.f(x)", "torch.mul, other=2.0", "torch.mul, other=3.0",
        init="self.f = functools.partial(torch.mul, other=2.0)"),
    "partial's function": Case("x = self.f(x, 2.0)", "torch.mul", "torch.add",
        init="self.f = functools.partial(torch.mul)"),
    "partial of a partial": Case("x = self.f(x)", "2.0", "3.0",
        init="self.f = functools.partial(functools.partial(torch.mul, other=2.0))"),
    "partialmethod": Case("x = O_.g(x)", "2.0", "3.0",
        top="class O:\n    def h(self, x, by):\n        return x * by\n    g = functools.partialmethod(h, by=2.0)\nO_ = O()\n"),
    "numpy array": Case("x = x * float(self.a[1])", "[1.0, 2.0]", "[1.0, 3.0]",
        init="self.a = np.array([1.0, 2.0])"),
    "numpy array of objects": Case("x = x * self.a[0].v", "O(2.0)", "O(3.0)", init="self.a = np.array([O(2.0)])",
        top="class O:\n    def __init__(self, v):\n        self.v = v\n"),
    "numpy array global": Case("x = x * float(A.sum())", "2.0", "3.0", top="A = np.array([1.0, 2.0])"),
    "numpy number": Case("x = x * float(self.a)", "2.0", "3.0", init="self.a = np.float64(2.0)"),
    "module-level tensor's contents": Case("x = x * T", "[2.0]", "[3.0]", top="T = torch.tensor([2.0])"),
    "tensor in a list": Case("x = x * self.ts[0]", "2.0", "3.0", init="self.ts = [torch.tensor(2.0)]"),
    "tensor read by item": Case("x = x * self.t.item()", "2.0", "3.0", init="self.t = torch.tensor(2.0)"),
    "descriptor": Case("x = x * self.o.d", "return 2.0", "return 3.0", init="self.o = O()",
        top="class D:\n    def __get__(self, o, t=None):\n        return 2.0\nclass O:\n    d = D()\n"),
    "descriptor's attribute": Case("x = x * self.o.d", "D(2.0)", "D(3.0)", init="self.o = O()",
        top="class D:\n    def __init__(self, v):\n        self.v = v\n    def __get__(self, o, t=None):\n"
            "        return self.v\nclass O:\n    d = D(2.0)\n"),
    "__getattr__": Case("x = x * self.o.anything", "return 2.0", "return 3.0", init="self.o = O()",
        top="class O:\n    def __getattr__(self, name):\n        return 2.0\n"),
    "__getattribute__": Case("x = x * self.o.anything", "return 2.0", "return 3.0", init="self.o = O()",
        top="class O:\n    def __getattribute__(self, name):\n        return 2.0\n"),
    "__getattr__ of a module of Python's": Case("x = x * M.anything", "lambda name: 2.0", "lambda name: 3.0",
        top="M = types.ModuleType('M')\nM.__getattr__ = lambda name: 2.0\n"),
    "module made of nothing": Case("x = x * M.v", "M.v = 2.0", "M.v = 3.0",
        top="M = types.ModuleType('M')\nM.v = 2.0\n"),
    "metaclass property": Case("x = x * O.v", "return 2.0", "return 3.0",
        top="class M(type):\n    @property\n    def v(cls):\n        return 2.0\nclass O(metaclass=M):\n    pass\n"),
    "metaclass attribute": Case("x = x * O.v", "v = 2.0", "v = 3.0",
        top="class M(type):\n    v = 2.0\nclass O(metaclass=M):\n    pass\n"),
    "metaclass method": Case("x = O.times(x)", "x * 2.0", "x * 3.0",
        top="class M(type):\n    def times(cls, x):\n        return x * 2.0\nclass O(metaclass=M):\n    pass\n"),
    "__len__": Case("x = x * len(self.o)", "return 2", "return 3", init="self.o = O()",
        top="class O:\n    def __len__(self):\n        return 2\n"),
    "__call__ of a class": Case("x = O(x)", "x * 2", "x * 3",
        top="class O:\n    def __new__(cls, x):\n        return x * 2\n"),
    "__class_getitem__": Case("x = x * O[1]", "return 2.0", "return 3.0",
        top="class O:\n    def __class_getitem__(cls, k):\n        return 2.0\n"),
    "__torch_function__ of a subclass": Case("x = O.g(x)", "x * 2.0", "x * 3.0",
        top="class O:\n    @staticmethod\n    def g(x):\n        return x * 2.0\n"),
    "property": Case("x = x * self.o.p", "return 2.0", "return 3.0", init="self.o = B()",
        top="class B:\n    @property\n    def p(self):\n        return 2.0\n"),
    "cached property": Case("x = x * self.o.p", "return 2.0", "return 3.0", init="self.o = B()",
        top="class B:\n    @functools.cached_property\n    def p(self):\n        return 2.0\n"),
    "class attribute of a base": Case("x = x * self.o.v", "v = 2.0", "v = 3.0", init="self.o = C()",
        top="class B:\n    v = 2.0\nclass C(B):\n    pass\n"),
    "method of a subclass": Case("x = self.o.f(x)", "f(x) * 2.0", "f(x) * 3.0", init="self.o = C()",
        top="class B:\n    def f(self, x):\n        return x\nclass C(B):\n    def f(self, x):\n"
            "        return super().f(x) * 2.0\n"),
    "bases in another order": Case("x = self.o.f(x)", "class C(A, B)", "class C(B, A)", init="self.o = C()",
        top="class A:\n    def f(self, x):\n        return x * 2\nclass B:\n    def f(self, x):\n        return x * 3\n"
            "class C(A, B):\n    pass\n"),
    "class of an object": Case("x = self.o.f(x)", "self.o = A()", "self.o = B()", init="self.o = A()",
        top="class A:\n    def f(self, x):\n        return x * 2\nclass B(A):\n    def f(self, x):\n        return x * 3\n"),
    "lambda in a list": Case("for f in FS:\n    x = f(x)", "x * 2", "x * 3", top="FS = [lambda x: x * 2]"),
    "lambda in a dict of an attribute": Case("x = self.fs['a'](x)", "x * 2", "x * 3",
        init="self.fs = {'a': lambda x: x * 2}"),
    "lambda with a default": Case("x = self.f(x)", "y=2.0", "y=3.0", init="self.f = lambda x, y=2.0: x * y"),
    "keyword default": Case("x = f(x)", "y=2.0", "y=3.0", top="def f(x, *, y=2.0):\n    return x * y\n"),
    "mutable default": Case("x = f(x)", "[2.0]", "[3.0]", top="def f(x, y=[2.0]):\n    return x * y[0]\n"),
    "closure in a closure": Case("x = F1(x)", "outer(2.0)", "outer(3.0)",
        top="def outer(a):\n    def mid(b):\n        def inner(x):\n            return x * a + b\n        return inner\n"
            "    return mid(1.0)\nF1 = outer(2.0)\n"),
    "closure over an object": Case("x = F1(x)", "O(2.0)", "O(3.0)",
        top="class O:\n    def __init__(self, v):\n        self.v = v\ndef outer(o):\n    return lambda x: x * o.v\n"
            "F1 = outer(O(2.0))\n"),
    "decorator": Case("x = f(x)", "g(x) * 2", "g(x) * 3",
        top="def deco(g):\n    @functools.wraps(g)\n    def w(x):\n        return g(x) * 2\n    return w\n"
            "@deco\ndef f(x):\n    return x + 1\n"),
    "decorated function": Case("x = f(x)", "x + 1", "x + 2",
        top="def deco(g):\n    @functools.wraps(g)\n    def w(x):\n        return g(x) * 2\n    return w\n"
            "@deco\ndef f(x):\n    return x + 1\n"),
    "decorator with an argument": Case("x = f(x)", "deco(2.0)", "deco(3.0)",
        top="def deco(by):\n    def make(g):\n        @functools.wraps(g)\n        def w(x):\n            return g(x) * by\n"
            "        return w\n    return make\n@deco(2.0)\ndef f(x):\n    return x + 1\n"),
    "attribute of a function": Case("x = x * f.v", "f.v = 2.0", "f.v = 3.0", top="def f():\n    pass\nf.v = 2.0\n"),
    "cached function": Case("x = x * f()", "return 2.0", "return 3.0",
        top="@functools.lru_cache\ndef f():\n    return 2.0\n"),
    "global within a cached function": Case("x = x * f()", "G = 2.0", "G = 3.0",
        top="G = 2.0\n@functools.lru_cache\ndef f():\n    return G\n"),
    "cached function that was called before": Case("x = x * f()", "G = 2.0", "G = 3.0",
        top="G = 2.0\n@functools.lru_cache\ndef f():\n    return g()\ndef g():\n    return h() * 1.0\n"
            "def h():\n    return G\nf()\n"),
    "what a cached function was called before with": Case("x = x * f()", "G = 2.0", "G = 4.0",
        top="G = 2.0\n@functools.lru_cache\ndef f():\n    return G\nf()\nG = 3.0\n"),
    "what a cached function of others remembers": Case("x = x * f()", "G = [2.0]", "G = [4.0]",
        top="G = [2.0]\ndef g():\n    return G[0]\n@functools.cache\ndef f():\n    return g()\nf()\nG[0] = 3.0\n"),
    "context variable": Case("x = x * V.get()", "V.set(2.0)", "V.set(3.0)",
        top="V = contextvars.ContextVar('V')\nV.set(2.0)\n"),
    "default of a context variable": Case("x = x * V.get()", "default=2.0", "default=3.0",
        top="V = contextvars.ContextVar('V', default=2.0)\n"),
    "thread-local value": Case("x = x * L.v", "L.v = 2.0", "L.v = 3.0", top="L = threading.local()\nL.v = 2.0\n"),
    "name of the thread": Case("x = x * len(threading.current_thread().name)", "'abc'", "'abcd'",
        top="threading.current_thread().name = 'abc'"),
    "level of a logger": Case("x = x * (2.0 if log.isEnabledFor(logging.INFO) else 1.0)", "log.setLevel(10)",
        "log.setLevel(40)", top="log = logging.getLogger('mutated')\nlog.setLevel(10)\n"),
    "level of a logger's parent": Case("x = x * (2.0 if log.isEnabledFor(logging.INFO) else 1.0)", "setLevel(10)",
        "setLevel(40)", top="log = logging.getLogger('mutated.sub')\nlogging.getLogger('mutated').setLevel(10)\n"),
    "attribute of a logger": Case("x = x * log.scale", "log.scale = 2.0", "log.scale = 3.0",
        top="log = logging.getLogger('mutated')\nlog.scale = 2.0\n"),
    "filters of warnings": Case("x = x * (len(warnings.filters) + 1)", "range(1)", "range(2)",
        top="[warnings.filters.append(('ignore', None, UserWarning, None, 0)) for _ in range(1)]"),
    "environment variable by get": Case("x = x * float(os.environ.get('MUTATED', '1'))", "= '2'", "= '3'",
        top="os.environ['MUTATED'] = '2'"),
    "environment variable by getenv": Case("x = x * float(os.getenv('MUTATED'))", "= '2'", "= '3'",
        top="os.environ['MUTATED'] = '2'"),
    "whether there is an environment variable": Case("x = x * (2 if 'MUTATED_2' in os.environ else 1)",
        "os.environ['MUTATED_2'] = '1'", "os.environ.pop('MUTATED_2', None)", top="os.environ['MUTATED_2'] = '1'"),
    "class of dates imported by name": Case("x = x * D.now().year", "xyz", "abc",
        top="D = datetime.datetime  # xyz"),
    "file by pathlib": Case("x = x * (2 if Path('/tmp').exists() else 1)", "zzz", "abc", top="# zzz", kept=False),
    "file of an attribute": Case("x = x * (2 if self.p.exists() else 1)", "zzz", "abc", top="# zzz", kept=False,
        init="self.p = Path('/tmp')"),
    "working directory": Case("x = x * len(str(Path.cwd()))", "zzz", "abc", top="# zzz", kept=False),
    "os.path": Case("x = x * (2 if os.path.isdir('/tmp') else 1)", "zzz", "abc", top="# zzz", kept=False),
    "home directory": Case("x = x * len(os.path.expanduser('~'))", "zzz", "abc", top="# zzz", kept=False),
    "process": Case("x = x * (os.getpid() % 7 + 1)", "zzz", "abc", top="# zzz", kept=False),
    "locale": Case("x = x * len(str(locale.getlocale()))", "zzz", "abc", top="# zzz", kept=False),
    "hash of a string": Case("x = x * (hash('abc') % 7 + 1)", "zzz", "abc", top="# zzz", kept=False),
    "identity": Case("x = x * (id(self) % 7 + 1)", "zzz", "abc", top="# zzz", kept=False),
    "the stack": Case("x = x * len(inspect.stack())", "zzz", "abc", top="# zzz", kept=False),
    "the stack as text": Case("x = x * len(traceback.extract_stack())", "zzz", "abc", top="# zzz", kept=False),
    "a frame": Case("x = x * sys._getframe(0).f_lineno", "zzz", "abc\n\n", top="# zzz", kept=False),
    "arguments of the command": Case("x = x * len(sys.argv)", "zzz", "abc", top="# zzz", kept=False),
    "a weak reference": Case("x = x * W().v", "O(2.0)", "O(3.0)",
        top="class O:\n    def __init__(self, v):\n        self.v = v\nKEEP = O(2.0)\nW = weakref.ref(KEEP)\n"),
    "a weak dictionary": Case("x = x * W['a'].v", "O(2.0)", "O(3.0)",
        top="class O:\n    def __init__(self, v):\n        self.v = v\nKEEP = O(2.0)\n"
            "W = weakref.WeakValueDictionary(a=KEEP)\n"),
    "subclasses of a class": Case("x = x * len(O.__subclasses__())", "class B(O)", "class A2(O):\n    pass\nclass B(O)",
        top="class O:\n    pass\nclass B(O):\n    pass\n"),
    "registered with an abstract class": Case("x = x * (2 if isinstance(self.b, O) else 1)", "O.register(B)", "pass",
        top="class O(abc.ABC):\n    pass\nclass B:\n    pass\nO.register(B)\n", init="self.b = B()"),
    "attribute by a computed name": Case("x = x * getattr(self, 'a' + 'b')", "2.0", "3.0", init="self.ab = 2.0"),
    "attribute by a computed name of what cannot be compared": Case("x = x * next(iter(getattr(self, 'a' + 'b')()))",
        "2.0", "3.0", init="it = iter([2.0])\nself.ab = lambda: it"),
    "iterator by a computed name": Case("x = x * getattr(self, 'a' + 'b').__reduce__()[1][0][0]",
        "2.0", "3.0", init="self.ab = iter([2.0])"),
    "global of the module by a computed name": Case("x = x * getattr(sys.modules[__name__], 'G' + 'G')", "GG = 2.0",
        "GG = 3.0", top="GG = 2.0"),
    "attrgetter": Case("x = x * G(self.o)", "'a'", "'b'", init="self.o = O()",
        top="G = operator.attrgetter('a')\nclass O:\n    a = 2.0\n    b = 3.0\n"),
    "generator": Case("x = x * next(self.g)", "2.0", "3.0", init="self.g = itertools.repeat(2.0)"),
    "count": Case("x = x * next(C)", "count(2)", "count(3)", top="C = itertools.count(2)"),
    "set": Case("x = x * sum(self.s)", "{1.0, 2.0}", "{1.0, 3.0}", init="self.s = {1.0, 2.0}"),
    "deque": Case("x = x * self.q[0]", "[2.0]", "[3.0]", init="self.q = collections.deque([2.0])"),
    "default dict's default": Case("x = x * len(self.d.default_factory())", "lambda: [1, 2]", "lambda: [1, 2, 3]",
        init="self.d = collections.defaultdict(lambda: [1, 2])"),
    "counter": Case("x = x * self.c['a']", "'aab'", "'aaab'", init="self.c = collections.Counter('aab')"),
    "chain map": Case("x = x * self.c['a']", "2.0", "3.0", init="self.c = collections.ChainMap({'a': 2.0})"),
    "ordered dict": Case("x = x * list(self.c.values())[0]", "2.0", "3.0",
        init="self.c = collections.OrderedDict(a=2.0)"),
    "user dict": Case("x = x * self.c['a']", "2.0", "3.0", init="self.c = collections.UserDict(a=2.0)"),
    "simple namespace": Case("x = x * self.c.a", "2.0", "3.0", init="self.c = types.SimpleNamespace(a=2.0)"),
    "mapping proxy": Case("x = x * self.c['a']", "2.0", "3.0", init="self.c = types.MappingProxyType({'a': 2.0})"),
    "subclass of float": Case("x = x * self.c.twice()", "Fl(2.0)", "Fl(3.0)", init="self.c = Fl(2.0)",
        top="class Fl(float):\n    def twice(self):\n        return float(self) * 2\n"),
    "subclass of dict": Case("x = x * self.c.a", "2.0", "3.0", init="self.c = Dct(a=2.0)",
        top="class Dct(dict):\n    def __getattr__(self, k):\n        return self[k]\n"),
    "a size": Case("x = x * self.s[0]", "[2, 3]", "[3, 3]", init="self.s = torch.Size([2, 3])"),
    "a dtype": Case("x = x.to(self.d).float()", "float64", "bfloat16", init="self.d = torch.float64"),
    "slots": Case("x = x * self.o.a", "O(2.0)", "O(3.0)", init="self.o = O(2.0)",
        top="class O:\n    __slots__ = ('a',)\n    def __init__(self, a):\n        self.a = a\n"),
    "private slots": Case("x = x * self.o.get()", "O(2.0)", "O(3.0)", init="self.o = O(2.0)",
        top="class O:\n    __slots__ = ('__a',)\n    def __init__(self, a):\n        self.__a = a\n"
            "    def get(self):\n        return self.__a\n"),
    "bound method of an object": Case("x = self.m(x)", "O(2.0)", "O(3.0)", init="self.m = O(2.0).times",
        top="class O:\n    def __init__(self, a):\n        self.a = a\n    def times(self, x):\n        return x * self.a\n"),
    "class method": Case("x = O.times(x)", "a = 2.0", "a = 3.0",
        top="class O:\n    a = 2.0\n    @classmethod\n    def times(cls, x):\n        return x * cls.a\n"),
    "function of autograd": Case("x = Fn.apply(x)", "g * 2", "g * 3",
        top="class Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x * 1.0\n"
            "    @staticmethod\n    def backward(ctx, g):\n        return g * 2\n"),
    "global in a backward": Case("x = Fn.apply(x)", "G = 2.0", "G = 3.0",
        top="G = 2.0\nclass Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
            "        return x * 1.0\n    @staticmethod\n    def backward(ctx, g):\n        return g * G\n"),
    "hook of a tensor": Case("x.register_hook(lambda g: g * self.by)", "2.0", "3.0", init="self.by = 2.0"),
    "hook of a module": Case("pass", "out * 2", "out * 3",
        init="self.lin.register_forward_hook(lambda m, a, out: out * 2)"),
    "pre-hook": Case("pass", "a[0] * 2", "a[0] * 3",
        init="self.lin.register_forward_pre_hook(lambda m, a: (a[0] * 2,))"),
    "pre-hook with keywords": Case("pass", "a[0] * 2", "a[0] * 3",
        init="self.lin.register_forward_pre_hook(lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True)"),
    "saved tensors' hooks": Case("with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * self.by):\n"
        "    x = x.exp()", "2.0", "3.0", init="self.by = 2.0"),
    "checkpoint": Case("x = checkpoint(lambda y: (y * self.by).exp(), x, use_reentrant=False)", "2.0", "3.0",
        init="self.by = 2.0", top="from torch.utils.checkpoint import checkpoint"),
    "parametrization": Case("pass", "w * 2", "w * 3", init="P.register_parametrization(self.lin, 'weight', Par())",
        top="import torch.nn.utils.parametrize as P\nclass Par(nn.Module):\n    def forward(self, w):\n"
            "        return w * 2\n"),
    "class attribute of torch's": Case("x = x * self.lin.mutated", "2.0", "3.0", top="nn.Linear.mutated = 2.0"),
    "list as a class attribute of torch's": Case("x = x * self.lin.mutated[0]", "2.0", "3.0",
        top="nn.Linear.mutated = [2.0]"),
    "attribute of a module of torch's": Case("x = x * torch.mutated", "2.0", "3.0", top="torch.mutated = 2.0"),
    "list in a module of torch's": Case("x = x * torch.mutated[0]", "2.0", "3.0", top="torch.mutated = [2.0]"),
    "object in a module of torch's": Case("x = x * torch.mutated.v", "O.v = 2.0", "O.v = 3.0",
        top="class O:\n    pass\nO.v = 2.0\ntorch.mutated = O()\n"),
    "attribute of a module of Python's": Case("x = x * math.mutated", "2.0", "3.0", top="math.mutated = 2.0"),
    "list in a module of Python's": Case("x = x * string.mutated[0]", "2.0", "3.0", top="string.mutated = [2.0]"),
    "constant of math": Case("x = x * math.tau", "math.tau = 6.0", "math.tau = 7.0", top="math.tau = 6.0"),
    "builtin": Case("x = x * mutated", "mutated = 2.0", "mutated = 3.0", top="import builtins\nbuiltins.mutated = 2.0"),
    "default dtype inside": Case("x = x + torch.zeros(1, dtype=self.d).to(x.dtype)", "float64",
        "float32", init="self.d = torch.float64"),
    "operator with another implementation in Python": Case("x = torch.ops.mutated.f(x)",
        "('f', f1, ", "('f', f2, ", top="lib = torch.library.Library('mutated', 'FRAGMENT')\n"
            "'f' in str(dir(torch.ops.mutated)) or lib.define('f(Tensor x) -> Tensor')\ndef f1(x):\n    return x * 2.0\n"
            "def f2(x):\n    return x * 3.0\nlib.impl('f', f1, 'CompositeImplicitAutograd')\n"),
    "registry that a decorator fills": Case("x = R['a'](x)", "x * 2", "x * 3",
        top="R = {}\ndef reg(f):\n    R[f.__name__] = f\n    return f\n@reg\ndef a(x):\n    return x * 2\n"),
    "what a registry holds under a name": Case("x = R['a'](x)", "R['a'] = f", "R['a'] = g",
        top="R = {}\ndef f(x):\n    return x * 2\ndef g(x):\n    return x * 3\nR['a'] = f\n"),
    "singledispatch": Case("x = f(x)", "x * 2", "x * 3",
        top="@functools.singledispatch\ndef f(x):\n    return x\n@f.register\ndef _(x: torch.Tensor):\n"
            "    return x * 2\n"),
    "match of patterns": Case("match self.c:\n    case C(a=2.0):\n        x = x * 2\n    case _:\n        x = x * 3",
        "C(2.0)\n", "C(4.0)\n", init="self.c = C(2.0)\n",
        top="@dataclasses.dataclass\nclass C:\n    a: float\n"),
    "format": Case("x = x * len(f'{self.v:>{self.w}}')", "self.w = 5", "self.w = 6", init="self.v = 1\nself.w = 5"),
    "annotations": Case("x = x * float(C.__annotations__['a'])", "'2.0'", "'3.0'", top="class C:\n    a: '2.0'\n"),
    "annotations of a function": Case("x = x * float(f.__annotations__['a'])", "'2.0'", "'3.0'",
        top="def f(a: '2.0'):\n    pass\n"),
    "documentation": Case("x = x * len(f.__doc__)", "'''ab'''", "'''abc'''", top="def f():\n    '''ab'''\n"),
    "documentation of a class": Case("x = x * len(C.__doc__)", "'''ab'''", "'''abc'''", top="class C:\n    '''ab'''\n"),
    "fields of a dataclass": Case("x = x * len(dataclasses.fields(C))", "    b: int\n", "    b: int\n    c: int\n",
        top="@dataclasses.dataclass\nclass C:\n    a: int\n    b: int\n"),
    "metadata of a field": Case("x = x * dataclasses.fields(C)[0].metadata['s']", "2.0", "3.0",
        top="@dataclasses.dataclass\nclass C:\n    a: int = dataclasses.field(default=1, metadata={'s': 2.0})\n"),
    "metadata of a field by its name": Case("x = x * C.__dataclass_fields__['a'].metadata['s']", "2.0", "3.0",
        top="@dataclasses.dataclass\nclass C:\n    a: int = dataclasses.field(default=1, metadata={'s': 2.0})\n"),
    "signature of a function": Case("x = x * len(inspect.signature(f).parameters)", "def f(a)", "def f(a, b)",
        top="def f(a):\n    pass\n"),
    "default by signature": Case("x = x * inspect.signature(f).parameters['a'].default", "a=2.0", "a=3.0",
        top="def f(a=2.0):\n    pass\n"),
    "source of a function": Case("x = x * len(inspect.getsource(f))", "# zzz", "# zzzz",
        top="def f():\n    # zzz\n    pass\n",
        kept=False),
    "line of a function": Case("x = x * f.__code__.co_firstlineno", "zzz", "abc\n",
        top="# zzz\ndef f():\n    pass\n", kept=False),
    "name of a class": Case("x = x * len(type(self.o).__name__)", "Abc", "Abcd", top="class Abc:\n    pass\n",
        init="self.o = Abc()"),
    "unused buffer's persistence": Case("x = x * len(self._non_persistent_buffers_set)", "persistent=True",
        "persistent=False", init="self.register_buffer('b', torch.ones(1), persistent=True)"),
    "a submodule's name": Case("x = x * len(list(dict(self.named_children()))[-1])", "self.abc", "self.abcd",
        init="self.abc = nn.Identity()"),
    "training of a submodule": Case("x = x * (2 if self.d.training else 3)", "pass  # zz", "self.d.eval()",
        init="self.d = nn.Identity()\npass  # zz"),
    "a number of nn.Dropout": Case("x = self.d(x)", "self.d.p = 0.0", "self.d.p = 1.0",
        init="self.d = nn.Dropout()\nself.d.p = 0.0"),
    "eps of a norm": Case("x = self.d(x)", "eps=1e-5", "eps=1.0", init="self.d = nn.LayerNorm(4, eps=1e-5)"),
    "activation by name": Case("x = getattr(F, self.act)(x)", "'relu'", "'silu'", init="self.act = 'relu'"),
    "activation as a function": Case("x = self.act(x)", "F.relu", "F.silu", init="self.act = F.relu"),
    "activation as a method of tensors": Case("x = self.act(x)", "torch.Tensor.relu", "torch.Tensor.exp",
        init="self.act = torch.Tensor.relu"),
    "activation of a table": Case("x = ACTS[self.act](x)", "'a': F.relu", "'a': F.silu", init="self.act = 'a'",
        top="ACTS = {'a': F.relu, 'b': F.gelu}"),
    "operator": Case("x = self.act(x)", "torch.ops.aten.relu.default", "torch.ops.aten.silu.default",
        init="self.act = torch.ops.aten.relu.default"),
    "ufunc of numpy": Case("x = x * float(self.u(2.0))", "np.exp2", "np.square", init="self.u = np.exp2"),
    "complex": Case("x = x * self.c.imag", "2j", "3j", init="self.c = 2j"),
    "bytes": Case("x = x * self.c[0]", "b'a'", "b'b'", init="self.c = b'a'"),
    "bytearray": Case("x = x * self.c[0]", "b'a'", "b'b'", init="self.c = bytearray(b'a')"),
    "memoryview": Case("x = x * self.c[0]", "b'a'", "b'b'", init="self.c = memoryview(b'a')"),
    "array": Case("x = x * self.c[0]", "[2]", "[3]", init="import array\nself.c = array.array('i', [2])"),
    "range": Case("x = x * len(self.c)", "range(2)", "range(3)", init="self.c = range(2)"),
    "slice": Case("x = x[:, self.c]", "slice(1)", "slice(2)", init="self.c = slice(1)"),
    "minus zero": Case("x = x * math.copysign(2.0, self.c)", "= 0.0", "= -0.0", init="self.c = 0.0"),
    "int or float": Case("x = x * (2 if isinstance(self.c, int) else 3)", "= 1", "= 1.0", init="self.c = 1"),
    "bool or int": Case("x = x * (2 if self.c is True else 3)", "= True", "= 1", init="self.c = True"),
    "nan": Case("x = x * (2 if self.c == self.c else 3)", "'nan'", "'1'", init="self.c = float('nan')"),
    "identity of two attributes": Case("x = x * (2 if self.a is self.b else 3)", "self.b = self.a", "self.b = [1.0]",
        init="self.a = [1.0]\nself.b = self.a"),
    "identity of two tensors": Case("x = x * (2 if self.a is self.b else 3)", "self.b = self.a",
        "self.b = self.a.clone()",
        init="self.a = torch.ones(1)\nself.b = self.a"),
    "a class made by a function": Case("x = self.o.f(x)", "make(2.0)", "make(3.0)", init="self.o = make(2.0)()",
        top="def make(by):\n    class Made:\n        def f(self, x):\n            return x * by\n    return Made\n"),
    "a class made by type": Case("x = self.o.f(x)", "x * 2", "x * 3", init="self.o = Made()",
        top="Made = type('Made', (), {'f': lambda self, x: x * 2})"),
    "function made by exec before": Case("x = NS['f'](x)", "x * 2", "x * 3",
        top="NS = {}\nexec('def f(x):\\n    return x * 2\\n', NS)\n"),
    "function within forward": Case("def f(y):\n    return y * 2\nx = f(x)", "y * 2", "y * 3"),
    "class within forward": Case("class C:\n    v = 2.0\nx = x * C.v", "v = 2.0", "v = 3.0"),
    "import within forward": Case("import cached_helper\nx = x * cached_helper.FACTOR", "zzz", "abc", top="# zzz",
        kept=False),
    "star import": Case("x = x * v", "v = 2.0", "v = 3.0", top="v = 2.0\n"),
    "module attribute of the class of the model": Case("x = x * self.v", "Net.v = 2.0", "Net.v = 3.0",
        init="Net.v = 2.0"),
    "static method": Case("x = self.s(x)", "x * 2", "x * 3", init="type(self).s = staticmethod(lambda x: x * 2)"),
    "exception": Case("try:\n    x = x * T['b']\nexcept KeyError:\n    x = x * 3", "{'a': 2.0}", "{'b': 2.0}",
        top="T = {'a': 2.0}"),
    "context manager": Case("with c(2.0) as v:\n    x = x * v", "yield by", "yield by + 1",
        top="@contextlib.contextmanager\ndef c(by):\n    yield by\n"),
    "context manager of a class": Case("with C(2.0) as v:\n    x = x * v", "return self.by", "return self.by + 1",
        top="class C:\n    def __init__(self, by):\n        self.by = by\n    def __enter__(self):\n"
            "        return self.by\n    def __exit__(self, *_):\n        pass\n"),
    "generator function": Case("for v in g():\n    x = x * v", "yield 2.0", "yield 3.0",
        top="def g():\n    yield 2.0\n"),
    "recursion": Case("x = f(x, 2)", "x * 2", "x * 3",
        top="def f(x, n):\n    return x if n == 0 else f(x * 2, n - 1)\n"),
    "mutual recursion": Case("x = f(x, 2)", "x * 2", "x * 3",
        top="def f(x, n):\n    return x if n == 0 else g(x, n)\ndef g(x, n):\n    return f(x * 2, n - 1)\n"),
    "sorted by a key": Case("x = x * sorted([1.0, 2.0], key=K)[0]", "lambda v: v", "lambda v: -v",
        top="K = lambda v: v"),
    "operators of an object": Case("x = x * float(self.o + 1)", "2.0 + other", "3.0 + other", init="self.o = O()",
        top="class O:\n    def __add__(self, other):\n        return 2.0 + other\n"),
    "comparison of an object": Case("x = x * (2 if self.o == 1 else 3)", "return True", "return False",
        init="self.o = O()", top="class O:\n    __hash__ = None\n    def __eq__(self, other):\n        return True\n"),
    "an object as a key": Case("x = x * self.d[K]", "2.0", "3.0", init="self.d = {K: 2.0}",
        top="class O:\n    pass\nK = O()\n"),
    "torch.fx": Case("x = self.g(x)", "x * 2", "x * 3", init="self.g = torch.fx.symbolic_trace(lambda x: x * 2)"),
    "sequential's order": Case("x = self.s(x)", "nn.Tanh(), nn.Softplus()", "nn.Softplus(), nn.Tanh()",
        init="self.s = nn.Sequential(nn.Tanh(), nn.Softplus())"),
    "module held by an object": Case("x = self.o.m(x)", "nn.Tanh()", "nn.Sigmoid()", init="self.o = O(nn.Tanh())",
        top="class O:\n    def __init__(self, m):\n        self.m = m\n"),
    "module that is a global": Case("x = M(x)", "nn.Tanh()", "nn.Sigmoid()", top="M = nn.Tanh()"),
    "flag of the fast path": Case("x = x * (2 if torch.backends.mha.get_fastpath_enabled() else 3)",
        "torch.backends.mha.set_fastpath_enabled(True)", "torch.backends.mha.set_fastpath_enabled(False)",
        top="torch.backends.mha.set_fastpath_enabled(True)"),
    "number of threads": Case("x = x * torch.get_num_threads()", "zzz", "abc", top="# zzz"),
    "seed": Case("x = x * (torch.initial_seed() % 7 + 1)", "zzz", "abc", top="# zzz", kept=False),
    "grad mode": Case("x = x * (2 if torch.is_grad_enabled() else 3)", "zzz", "abc", top="# zzz"),
    "version": Case("x = x * len(torch.__version__)", "zzz", "abc", top="# zzz"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What models change of others is as it was."""
    import builtins
    import logging
    import math
    import os
    import string
    import threading
    import warnings

    import torch.backends.mha
    from torch import nn

    thread, name = threading.current_thread(), threading.current_thread().name
    monkeypatch.setattr(thread, "name", name)
    monkeypatch.setattr(math, "tau", math.tau)
    for owner in (nn.Linear, torch, math, string, builtins):
        monkeypatch.setattr(owner, "mutated", 0, raising=False)
        monkeypatch.delattr(owner, "mutated")
    for variable in ("MUTATED", "MUTATED_2"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(warnings, "filters", list(warnings.filters))
    monkeypatch.setattr(os, "environ", os.environ)
    for logger in ("mutated", "mutated.sub"):
        monkeypatch.setattr(logging.getLogger(logger), "level", 0)
    fast = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(fast)


def _outcome(launches: Launches, **options: object) -> object:
    """What a launch gives: loss and gradients, or what it raises."""
    try:
        loss, grads = launches.run(**options)
    except Exception as error:
        return type(error), str(error)[:200]
    return [loss, *grads]


def _same(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return all(torch.equal(a, b) or (a.isnan() == b.isnan()).all() for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and one == other


# Those that an earlier walk did not tell apart, or kept, and one of each other kind; the others are as these.
QUICK = {
    *("private slots", "thread-local value", "hash of a string", "file of an attribute", "a weak dictionary"),
    *("the stack", "annotations", "what a cached function was called before with", "default of a context variable"),
    *("operator with another implementation in Python", "attribute of a logger", "metaclass method", "descriptor"),
    *("list in a module of Python's", "list as a class attribute of torch's", "hook of a tensor", "namedtuple"),
}


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in CASES]
)
def test_a_launch_of_the_edited_source(empty: Launches, name: str) -> None:
    case = CASES[name]
    source = case.source()
    assert case.old in source
    empty.write("cached_model", source)
    first = _outcome(empty)
    assert case.kept or not empty.files(), first
    empty.write("cached_model", source.replace(case.old, case.new))
    second = _outcome(empty)
    fresh = _outcome(empty, cache=False)
    assert _same(second, fresh)
