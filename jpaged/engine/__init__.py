"""From scheduled steps to tokens: packing, compiled steps, the runner, and the engine's loop."""
