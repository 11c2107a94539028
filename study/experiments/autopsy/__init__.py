"""The autopsy of the published listing: an experiment that attributes its reported results to its protocol errors."""
