"""Pages with a layout of their own: releases, predictions and the like."""
