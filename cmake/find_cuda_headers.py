"""Print the folder of cuda.h of the cuda-runtime wheel that this Python sees; nothing if it sees none."""

import importlib.util
from pathlib import Path

# nvidia-cuda-runtime-cu12 and nvidia-cuda-runtime (13.x), in this order.
PACKAGES = ("nvidia.cuda_runtime", "nvidia.cu13")
HEADERS = ("cuda.h", "cudaTypedefs.h")


def places(package: str) -> list[str]:
    """The folders of `package`: namespace packages may have several, or none."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even `nvidia`
        return []
    return [] if spec is None else list(spec.submodule_search_locations or ())


def main() -> None:
    """Print the first folder that holds all headers."""
    for package in PACKAGES:
        for place in places(package):
            include = Path(place) / "include"
            if all((include / header).is_file() for header in HEADERS):
                print(include)
                return


if __name__ == "__main__":
    main()
