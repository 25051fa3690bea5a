"""flash-attention's functions and signatures, on CPUs and GPUs, in float32 too; and the operators
as the implementation of PyTorch's `varlen_attn`.

    from bert_unpad.flash import flash_attn_varlen_func  # as from flash_attn

    bert_unpad.flash.register()
    torch.nn.attention.activate_flash_attention_impl("bert_unpad")

flash-attention: https://github.com/Dao-AILab/flash-attention.
"""

from bert_unpad.flash.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from bert_unpad.flash.pytorch import register

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "register",
]
