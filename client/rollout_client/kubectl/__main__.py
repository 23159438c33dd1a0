"""The console script, which is installed without its extra as well."""

import sys


def main() -> None:
    """Run the plugin, or say what it lacks."""
    try:
        from rollout_client.kubectl.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"kubectl-rr needs {error.name}: pip install 'rollout-replica[kubectl]'")
    app(prog_name="kubectl rr")


if __name__ == "__main__":
    main()
