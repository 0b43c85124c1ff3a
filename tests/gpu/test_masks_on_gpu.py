"""What must hold on a GPU where attention keeps within documents: compiled blocks read each as if
it stood alone, in batches of any size, with and without gradients."""

import pytest
import torch

from lowcomm_node.models.base import build_model, computing
from lowcomm_node.trainer.gpu import loss_of
from lowcomm_protocol.spec.models import TransformerSettings

pytestmark = pytest.mark.gpu
MODEL = TransformerSettings(
    layers=2, width=256, heads=4, kv_heads=2, feed_forward=512, context=600, vocab=500
)
END = 7


@pytest.mark.parametrize("compiled", [True, False])
def test_documents_are_read_as_if_they_stood_alone(device: torch.device, compiled: bool) -> None:
    model = build_model(MODEL, 0).to(device)
    loss = loss_of(model, compiled)
    draw = torch.Generator().manual_seed(0)
    for windows in (4, 1, 3):
        tokens = torch.randint(8, 500, (windows, MODEL.context), generator=draw).to(device)
        tokens[:, 250] = END
        model.separator = END
        with computing(device):
            (whole := loss(tokens, tokens)).backward()
            with torch.no_grad():
                assert float(loss(tokens, tokens) - whole) == pytest.approx(0, abs=1e-3)
                logits = model(tokens)
        model.separator = None
        with computing(device), torch.no_grad():
            for start, stop in ((0, 251), (251, MODEL.context)):
                alone = model(tokens[:, start:stop])
                torch.testing.assert_close(logits[:, start:stop], alone, rtol=0.05, atol=0.02)
        assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
