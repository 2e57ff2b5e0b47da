// The functions of the driver that this library stands before.
#pragma once

#include <cstdint>
#include <string>

#include "driver_abi.h"
#include "gate.h"

namespace orion {

// The gate of the process. It is never destroyed: threads may launch while the process exits.
Gate& gate();

bool is_preloaded();

// Fill in the driver's functions. false: there is no driver, and why.
bool load_driver(cuda::Driver& driver, std::string& error);

uint64_t hooked();    // orion_totals.hooked
uint64_t unhooked();  // orion_totals.unhooked

}  // namespace orion
