"""Models to train and to measure attention in, written plainly."""

from flashlane.models.attention import ATTENTIONS, CausalAttention, select_attention
from flashlane.models.transformer import SIZES, Config, Transformer

__all__ = ["ATTENTIONS", "SIZES", "CausalAttention", "Config", "Transformer", "select_attention"]
