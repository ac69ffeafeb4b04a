"""Where arrays live: meshes, logical axis -> mesh axis rules, and checkpoints restored straight onto a mesh."""
