"""Looking at a captured step: what the driver shows of it, what was asked for, and what may be said because of both.

walk           a graph's nodes, as the driver tells them
attribution    which nodes belong to which op of the bound list
inspection     the two put together for one runtime
report         `StepGraph.report`: nodes, copies and bytes of each gather, and the claim
sequence       eager run and captured graph as rows of one form, compared
traced         a step that is captured once more, with events, for timelines
outside        events around what the host issues between graphs: gathers from outside, and folds
"""
