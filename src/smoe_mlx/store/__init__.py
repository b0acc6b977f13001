"""Expert bytes on disk. Knows files, offsets and threads; imports no MLX and knows no model."""
