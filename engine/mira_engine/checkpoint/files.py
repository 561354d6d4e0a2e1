"""Names of the files that say "this is whole", and of a home's lock.

Torch-free, so that the app may look.

Each marker is written last and by rename: where one is missing, the work beside it is unfinished.
"""

MANIFEST_FILE = "manifest.json"
"""In a store folder."""

BACKBONE_MARKER = "backbone.json"
"""In a backbone folder."""

CHECKPOINT_MARKER = "checkpoint.json"
"""In the built-in checkpoint's folder."""

LOCK_FILE = ".lock"
"""In a model's home: held by the process that prepares it."""
