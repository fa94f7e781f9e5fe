"""The package; the one place that states its version."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

TEST = [
    "hypothesis>=6.100",
    "pytest>=8.2",
    "pytest-xdist>=3.5",
    "safetensors>=0.4",
]

DOCS = ["furo", "myst-parser>=4", "sphinx>=8"]

setup(
    name="elasticrun",
    version="0.1.0",
    description="PyTorch training that goes on where it was, at any number of replicas",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["elasticrun", "elasticrun.*"]),
    package_data={"elasticrun": ["py.typed", "lint/pages/*.md", "report/page/*"]},
    install_requires=["torch>=2.7,<3", "numpy", "cloudpickle", "psutil"],
    entry_points={
        "console_scripts": ["elasticrun = elasticrun.__main__:main"],
    },
    extras_require={
        "progress": ["tqdm"],
        "safetensors": ["safetensors>=0.4"],
        "remote": ["fsspec>=2024.10"],  # and s3fs, gcsfs, ...: one a kind of store
        "streams": ["pyarrow", "zstandard"],  # Parquet; files that end in .zst
        "examples": ["scikit-learn"],
        "accelerate": ["accelerate>=1.0"],
        "lightning": ["lightning>=2.1"],
        "ray": ["ray[train]>=2.58"],
        "transformers": ["transformers>=5.23", "accelerate>=1.15"],
        "docs": DOCS,
        "test": TEST,
        "dev": [*TEST, "mypy", "ruff"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
