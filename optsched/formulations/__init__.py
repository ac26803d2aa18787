"""Mathematical models, one file each: data in, model, schedule out."""
