"""Files of other trainers as folders of runs."""
