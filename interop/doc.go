// Package interop tests Berth against real LMCache PD backends that exchange
// real bytes over NIXL: `make interop` and `make compare`, which install them.
// The tests have the build tags interop and nixl.
package interop
