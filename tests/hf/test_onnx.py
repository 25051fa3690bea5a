"""Models go to ONNX as stock ones, with a warning; a plain torch.export keeps our operators."""

import numpy as np
import pytest
import torch

from bert_unpad import hf
from bert_unpad.hf import fallback
from tests.support.hf_models import MASKS, call_arguments, clone, make

UNPADDED = ("BertModel", "RobertaForMaskedLM", "DistilBertForSequenceClassification")
# Without dynamo, the stock BertModel cannot be exported: it gets an argument twice.
CASES = [(name, dynamo) for name in UNPADDED for dynamo in (True, False)]


def inputs_with(name: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    call = call_arguments(name, mask, labels=False)
    return {key: call[key] for key in ("input_ids", "attention_mask")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "dynamo"), CASES)
def test_the_exported_model_computes_what_stock_does(name, dynamo, tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    monkeypatch.setattr(fallback, "_said", set())
    stock = make(name).eval()
    model = hf.unpad(clone(stock))
    path = tmp_path / "model.onnx"
    given = inputs_with(name, MASKS["right"])
    with pytest.warns(hf.StockFallbackWarning, match="traced|ONNX has none of its operators"):
        torch.onnx.export(
            model, (), str(path), kwargs=given, dynamo=dynamo, opset_version=18,
            input_names=list(given),
        )  # fmt: skip
    assert not any("bert_unpad" in node.domain for node in onnx.load(path).graph.node)
    # Another mask than the one it was exported with: nothing of that was kept as a constant.
    other = inputs_with(name, MASKS["holes"].long())
    (found, *_) = ReferenceEvaluator(str(path)).run(
        None, {key: value.numpy() for key, value in other.items()}
    )
    with torch.no_grad():
        expected = stock(**other)[0].numpy()
    kept = np.ones(len(expected), bool)
    if expected.ndim == 3:
        kept = other["attention_mask"].numpy().astype(bool)
    np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-4, atol=1e-5)
    assert not torch.onnx.is_in_onnx_export()


def test_a_plain_export_keeps_our_operators():
    model = hf.unpad(make("BertModel").eval())
    given = inputs_with("BertModel", MASKS["right"])
    program = torch.export.export(model, (), given)
    found = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "bert_unpad.varlen_attention.default" in found
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        torch.testing.assert_close(program.module()(**given).last_hidden_state, expected)
