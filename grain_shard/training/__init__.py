"""Around the training step: chips, meshes, batch sizes, model states, gradients."""
