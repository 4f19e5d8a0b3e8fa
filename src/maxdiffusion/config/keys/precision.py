"""Keys about number formats."""

from maxdiffusion.config.kinds import Choice
from maxdiffusion.config.schema import refused, used

DTYPES = Choice(("float32", "bfloat16"))

KEYS = (
    used(
        "weights_dtype",
        DTYPES,
        "bfloat16",
        "Transformer weights; norms, embedders and modulation tables stay float32.",
    ),
    used("activations_dtype", DTYPES, "bfloat16", "What the transformer computes in."),
    used("text_encoder_dtype", DTYPES, "bfloat16", "Weights and arithmetic of UMT5."),
    used("vae_weights_dtype", DTYPES, "float32", "Weights of the VAE."),
    used("vae_dtype", DTYPES, "float32", "What the VAE computes in."),
    refused(
        "scheduler_dtype",
        DTYPES,
        "float32",
        "What the sampler computes in.",
        way_out="Leave it at 'float32'",
    ),
    used(
        "precision",
        Choice(("DEFAULT", "HIGH", "HIGHEST")),
        "DEFAULT",
        "jax's matmul precision; HIGHEST makes float32 matmuls exact on TPUs.",
    ),
)
