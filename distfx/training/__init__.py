"""What a training script needs around the model: checkpoints."""
