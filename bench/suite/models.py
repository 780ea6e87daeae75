"""Local files with random weights in place of the models that llama-server's test suite downloads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench import synthetic
from bench.encoders import tiny_bert, tiny_reranker
from bench.lora_files import write_adapter
from bench.projector_files import picture, write_projector

N_POSITIONS = 512
"""Context of the suite's encoders, whose longest text has 258 tokens."""
RERANKER_WORDS = (
    "Machine",
    "learning",
    "is",
    "A",
    "machine",
    "Learnin",
    "Which",
    "city",
    "Paris",
    "capit",
    "de",
    "la",
)
"""So that the reranker's prompts have as many tokens as the suite expects."""
FIM_TOKENS = ("fim_pre", "fim_suf", "fim_mid")
CACHED = (
    "ggml-org/tinygemma3-GGUF:Q8_0",
    "ggml-org/test-model-stories260K:F32",
    "ggml-org/test-model-stories260K-infill:F32",
)
"""Models that the suite's tests of several models expect to have been downloaded before."""
IMAGES = ("11_truck.png", "91_cat.png")
"""Images that the suite's tests fetch, and send."""
_COMMIT = "0" * 40


def _image(path: Path, seed: int) -> Path:
    path.write_bytes(picture(seed, 32, 32))
    return path


class Models:
    """The files, in a folder that is filled when this is made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.decoder = synthetic.ensure("tiny-sentencepiece")
        encoder = tiny_bert(folder / "encoder.gguf", n_positions=N_POSITIONS)
        reranker = tiny_reranker(folder / "reranker.gguf", RERANKER_WORDS, n_positions=N_POSITIONS)
        # Without the delimiters of Gemma's images, which are many tokens of the decoder's vocabulary.
        projector = write_projector(folder / "mmproj.gguf", "mlp")
        # Three tokens of bytes that no text has.
        fim = ",".join(f"tokenizer.ggml.{name}_token_id=int:{3 + i}" for i, name in enumerate(FIM_TOKENS))
        self.flags: Mapping[str, list[str]] = {
            "bert-bge-small": ["--model", str(encoder)],
            "jina-reranker": ["--model", str(reranker)],
            "infill": ["--model", str(self.decoder), "--override-kv", fim],
            "tinygemma3": ["--model", str(self.decoder), "--mmproj", str(projector)],
            "": ["--model", str(self.decoder)],
        }
        """Flags for the models whose name contains a key; the last ones are for any model."""
        self.downloads = {
            "moe_shakespeare15M.gguf": str(write_adapter(folder / "adapter.gguf", self.decoder, seed=1)),
            "stories15M-q4_0.gguf": str(self.decoder),
            **{name: str(_image(folder / name, seed)) for seed, name in enumerate(IMAGES)},
        }
        """Files in place of those that the tests fetch themselves, by name."""
        self.hub = folder / "hub"
        """Cache of Hugging Face's hub with `CACHED`."""
        self.table = folder / "models.toml"
        """The same models as a table of llamaslot's."""
        self._write_hub()

    def _write_hub(self) -> None:
        table = ""
        for name in CACHED:
            repository, quant = name.split(":")
            base = self.hub / f"models--{repository.replace('/', '--')}"
            file = base / "snapshots" / _COMMIT / f"model-{quant}.gguf"
            for parent in (file.parent, base / "refs"):
                parent.mkdir(parents=True, exist_ok=True)
            (base / "refs" / "main").write_text(_COMMIT)
            file.unlink(missing_ok=True)
            file.symlink_to(self.decoder)
            table += f'[models."{name}"]\nmodel = "{self.decoder}"\n'
        self.table.write_text(table)
