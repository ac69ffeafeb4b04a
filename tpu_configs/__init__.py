"""TPU chips, slices and deployments as data; what they can hold and how fast they can be."""
