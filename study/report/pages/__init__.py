"""Pages with a layout of their own: releases, predictions, the blocks of the README."""
