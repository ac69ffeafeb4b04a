"""What a model is: its config, the Flax NNX decoder, and readers of foreign checkpoints. Knows no mesh and no pages."""
