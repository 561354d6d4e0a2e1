"""Names of the files that say "this is whole". Torch-free, so that the app may look.

Each is written last and by rename: where one is missing, the work beside it is unfinished.
"""

MANIFEST_FILE = "manifest.json"
"""In a store folder."""

BACKBONE_MARKER = "backbone.json"
"""In a backbone folder."""

CHECKPOINT_MARKER = "checkpoint.json"
"""In the built-in checkpoint's folder."""
