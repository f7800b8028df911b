"""A picture for tests that need any."""

from __future__ import annotations

import numpy as np

from agent_r1.vision.pictures import Picture

PICTURE = Picture.from_pixels(np.full((4, 6, 3), 200, np.uint8))
