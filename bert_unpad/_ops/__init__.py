"""Fake kernels, autograd and checks of the operators; `bert_unpad.ops` is the public face."""
