"""Runs the commands of ``python -m grain_shard``, which are in `grain_shard.tools.command`."""

from grain_shard.tools.command import command

if __name__ == "__main__":
    command()
