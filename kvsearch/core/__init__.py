"""The ground floor: errors, text and numbers, files, JSON and YAML. It knows nothing of caches."""
