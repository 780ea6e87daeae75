"""Resources of the engine: models (`llama`, the only importer of llama_cpp), disk, remote store, host memory."""
