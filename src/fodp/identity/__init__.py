"""Which record is which, and is this the private data? One room answers both questions for all doors.

* `origins`: a number for each place of a data set, the same only for one and the same record. Nothing is read.
* `row_samples`: keyed marks of some rows, equal for equal rows. Reading leaves no trace.
* `repeats`: refuses a record that is in the data twice (by origins), warns of rows that are (by marks).
* `private_data`: refuses what was given as public and is the private data (by origins), or a copy of it (by marks).

What stays invisible, here as everywhere: a copy whose rows were changed (another scale, another order of columns,
other words), a copy among the rows that were not sampled, rows that a data set makes anew each time, data that another
process or a file outside has, whatever a function does that is not written in Python, and people: two rows of one
person look like two people unless `owners` are named.
"""
