"""Compiled artefacts as the runtime sees them: manifest, checks, loading. Imports neither TVM's compiler nor torch."""
