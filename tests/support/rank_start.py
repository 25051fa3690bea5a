"""What takes long in every rank and can be done before it is forked; see `processes.py`."""

from bert_unpad.pretrain.config.parser import make_parser

make_parser()
