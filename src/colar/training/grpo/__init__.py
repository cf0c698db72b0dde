"""Group relative policy optimisation over latents and tokens."""
