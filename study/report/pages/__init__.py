"""Pages with a special layout: releases, predictions, the blocks of the README."""
