from bert_unpad._closed_pipe import run_main
from bert_unpad.convert.cli import main

run_main(main)
