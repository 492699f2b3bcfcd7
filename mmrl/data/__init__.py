"""From YAML to samples: loading, order, mixture, curriculum, prefetch."""
