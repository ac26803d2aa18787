"""How long a batch takes: cost models, profiles to fit them to, and data sheets of devices."""
