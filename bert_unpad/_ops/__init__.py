"""Fake kernels, autograd and checks of the operators; `bert_unpad.ops` is the public face."""

from bert_unpad import _library

_library.require()
