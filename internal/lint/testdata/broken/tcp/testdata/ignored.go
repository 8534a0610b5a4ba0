package ignored // not of the module: TODO
