// Package core is said to be something else here.
package core

func step() {
	go step()
	select {}
}

func wait() chan int { return nil }
