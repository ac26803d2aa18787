"""How long a batch takes: cost models, the profiles that they are fitted to, and data sheets."""
