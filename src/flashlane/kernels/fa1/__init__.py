"""FlashAttention-1 on CUDA cores, in f32."""
