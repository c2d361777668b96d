"""A working Kimi K3 at any width: KDA, MLA and latent MoE, cut into segments."""
