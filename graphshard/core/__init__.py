"""Pure data: errors, sizes, specs, plan, layout, ops, program and its lowering. Standard library only."""
