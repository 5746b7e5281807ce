"""Whisper's encoder. A row covers two frames."""

from motet.models.families.audio import AudioEncoder


class WhisperEncoder(AudioEncoder):
    """HF's WhisperEncoder on clips of any length up to its position table."""
