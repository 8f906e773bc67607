"""Models, servers and training from Python: what `import parallm` shows."""
