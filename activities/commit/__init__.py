"""The commit: archive' = expand(archive, verdicts), one link of the hash chain. The one place where a step becomes true."""
